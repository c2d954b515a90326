"""Names of the losses of chosen and rejected answers, see `layers.preference.PreferenceLoss`."""

REFERENCE_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo")  # They need a reference model.
PREFERENCE_LOSSES = (*REFERENCE_LOSSES, "simpo", "orpo")
MEAN_LOSSES = ("sigmoid_norm", "ipo", "simpo", "orpo")  # They compare means over tokens.
SMOOTHED_LOSSES = ("sigmoid", "sigmoid_norm", "simpo")
