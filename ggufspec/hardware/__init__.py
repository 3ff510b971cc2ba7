"""This machine's hardware: GPUs (the only importer of pynvml), host (the only importer of psutil)."""
