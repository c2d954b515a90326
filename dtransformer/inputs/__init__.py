"""Readers of external data, which check everything that the library reads.

Files, archives, YAML, JSON and weights may be damaged or malicious. Each reader limits size, depth
and number of values before it allocates memory. It returns values of known types or raises a
one-line `InputError`. The rest of the code handles checked values only.

`files` opens, reads and decompresses files and checks paths. `text` reads lines. `yaml_file` and
`json_file` return plain or typed values. `safetensors_file` and `weights_file` check tensors before
they are loaded.
"""
