"""Certificate that speculation changed nothing, and self-check that llama.cpp computes correctly."""
