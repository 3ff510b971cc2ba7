"""The Hugging Face hub: what it offers, and how it is downloaded."""
