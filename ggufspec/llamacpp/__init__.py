"""The only room that imports ``llama_cpp``: library, devices, models."""
