"""llama.cpp's library, devices and models; the only package that imports ``llama_cpp``."""
