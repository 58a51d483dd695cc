# instep and torch for a CPU, or for CUDA, whose libraries torch's wheels bring along (the host needs NVIDIA's container toolkit):
#   docker build -t instep:cpu .
#   docker build -t instep:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --rm --shm-size 8g -v "$PWD:/work" instep:cpu python train.py       # --gpus all for CUDA
FROM python:3.12-slim-bookworm

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# torch.compile calls a compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# torch alone first: a layer of gigabytes that stays when instep changes.
# hadolint ignore=DL3013
RUN pip install torch --index-url "$TORCH_INDEX"

COPY pyproject.toml README.md LICENSE /src/
COPY instep /src/instep
RUN pip install /src && useradd --create-home --uid 1000 trainer

USER 1000
WORKDIR /work

# SIGTERM reaches the program itself, which saves and exits with 75; `docker stop --time 120` gives it two minutes.
STOPSIGNAL SIGTERM
CMD ["instep", "env"]
