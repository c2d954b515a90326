"""Mixture of experts in NumPy float64, one token at a time."""

import math

import numpy as np

from tests.layers import reference


def route(config, logits, bias):
    """Return a token's experts, their gates, and the probabilities of all experts."""
    if config.router_type == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        probabilities, ranked = scores, scores
    else:
        scores = 1 / (1 + np.exp(-logits))
        probabilities, ranked = scores / scores.sum(), scores + bias
    allowed = range(config.expert_num)
    if config.routing_groups_chosen < config.routing_groups:
        members = np.split(np.arange(config.expert_num), config.routing_groups)
        worth = [np.sort(ranked[group])[-2:].sum() for group in members]
        best = np.argsort(worth)[::-1][: config.routing_groups_chosen]
        allowed = [e for index in best for e in members[index]]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: config.num_experts_chosen]
    gates = scores[chosen]
    return chosen, gates / gates.sum() if len(chosen) > 1 else gates, probabilities


def token_groups(config, batch, length):
    """Return the token groups as lists of positions (row, column) in capacity order."""
    everyone = [[(row, column) for column in range(length)] for row in range(batch)]
    if config.expert_group_size is None:
        return [[position for row in everyone for position in row]], batch * length
    size = min(config.expert_group_size, length)
    starts = range(0, length, size)
    return [row[start : start + size] for row in everyone for start in starts], size


def moe(config, x, weights, mask=None, hidden_act="gelu"):
    """Return the output, the auxiliary loss, and the set of dropped (row, column, expert).

    Args:
        config: A `MoEConfig`.
        x: Array of shape `[b, s, h]`.
        weights: Dictionary of the layer's weights.
        mask: Array of shape `[b, s]`, or `None`.
    """
    activation = lambda x: reference.ACTIVATIONS[hidden_act](x)[0]
    batch, length, _ = x.shape
    output, costs, dropped = np.zeros_like(x), [], set()
    groups, size = token_groups(config, batch, length)
    share = config.num_experts_chosen * config.capacity_factor / config.expert_num
    max_tokens = math.inf if config.dropless else max(1, math.ceil(size * share - 1e-6))
    for group in groups:
        tokens = [p for p in group if mask is None or mask[p]]
        load, accepted = np.zeros(config.expert_num), np.zeros(config.expert_num)
        probability, square = np.zeros(config.expert_num), 0.0
        for position in tokens:
            logits = x[position] @ weights["router_kernel"] + weights.get("router_logits_bias", 0)
            chosen, gates, probabilities = route(config, logits, weights.get("router_bias"))
            probability += probabilities
            square += np.log(np.exp(logits).sum()) ** 2
            for expert, gate in zip(chosen, gates):
                load[expert] += 1
                if accepted[expert] >= max_tokens:
                    dropped.add((*position, expert))
                    continue
                accepted[expert] += 1
                inner = x[position] @ weights["mapping_kernel"][expert]
                inner = activation(inner + weights["mapping_bias"][expert])
                y = inner @ weights["projection_kernel"][expert]
                output[position] += gate * (y + weights["projection_bias"][expert])
        count = max(len(tokens), 1)
        balance = config.expert_num * (load / max(load.sum(), 1)) @ (probability / count)
        costs.append(config.aux_loss_factor * balance + config.z_loss_factor * square / count)
    return output, np.mean(costs), dropped
