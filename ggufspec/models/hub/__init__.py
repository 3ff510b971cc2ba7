"""Look-up and download of models on the Hugging Face hub."""
