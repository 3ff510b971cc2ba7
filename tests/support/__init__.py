"""What tests share: real GGUF files, servers, terminals, child processes, simulated machines."""
