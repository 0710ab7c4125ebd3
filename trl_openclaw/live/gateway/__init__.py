"""The gateway: OpenAI's chat API over an engine, which records what it passes on."""
