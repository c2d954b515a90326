"""The boundary: whatever is read from outside is checked here, and nowhere else.

Files, archives, YAML, JSON and weights may be damaged, careless or hostile. Each reader here has
limits on size, depth and number, checked before memory is taken, and gives values of known types or
an `InputError` of one line. The rest of the code sees checked values only.

`files` opens, reads and unpacks, and keeps names inside of a folder; `text` gives lines;
`yaml_file` and `json_file` give plain values, or those of typed fields; `safetensors_file` and
`weights_file` look at tensors before they are loaded.
"""
