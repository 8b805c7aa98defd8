# `regard serve` for the CPU: docs/serve.md says how to run it.
FROM python:3.12-slim

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
# The address of PyTorch's own list of CPU builds (pytorch.org, "Get started", CPU). Without it torch brings the CUDA libraries.
ARG TORCH_CPU_WHEELS=""
RUN PIP_EXTRA_INDEX_URL=$TORCH_CPU_WHEELS pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve]' && useradd --system serve

USER serve
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["regard", "serve", "--host", "0.0.0.0", "--token-file", "/token"]
