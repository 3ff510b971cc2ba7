"""HTTP endpoint for a pair, compatible with OpenAI's API."""
