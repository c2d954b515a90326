"""Parse custom calls in StableHLO modules into comparable data."""

import json
import re

_CALL = re.compile(
    r'custom_call @(?P<name>[\w$]+)\([^)]*\) \{.*?backend_config = "(?P<config>.*?)", '
    r"operand_layouts = \[(?P<operand_layouts>.*?)\], result_layouts = \[(?P<result_layouts>.*?)\]\}"
    r" : \((?P<operands>.*?)\) -> \((?P<results>.*?)\)"
)


def custom_calls(text: str) -> list[dict]:
    """Return a dict per custom call: name, config, and types and layouts of operands and results."""
    calls = []
    for match in _CALL.finditer(text):
        call = match.groupdict()
        call["config"] = json.loads(call["config"].replace(r"\22", '"'))
        for key in ("operands", "results"):
            call[key] = call[key].split(", ")
        for key in ("operand_layouts", "result_layouts"):
            call[key] = re.findall(r"dense<(.*?)>", call[key])
        calls.append(call)
    return calls
