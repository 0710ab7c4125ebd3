"""No test may reach a hub, and every test, with the processes it starts, runs on one thread."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",  # tiny models gain nothing from more, and tests may share the machine
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
    OPENAI_API_KEY="none",
)

pytest_plugins = ["fixtures_chat", "fixtures_engine", "fixtures_models", "fixtures_ranks", "vllm_server"]
