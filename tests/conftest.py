"""No test may reach a hub, and every test sees the same number of threads."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
    OPENAI_API_KEY="none",
)

pytest_plugins = ["fixtures_chat", "fixtures_models"]
