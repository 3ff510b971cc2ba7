"""This machine's hardware; only ``gpus`` imports pynvml, and only ``host`` imports psutil."""
