"""The certificate that speculation changed nothing, and that llama.cpp computes correctly."""
