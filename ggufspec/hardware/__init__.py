"""What this machine has: GPUs (the only importer of pynvml), host (the only importer of psutil)."""
