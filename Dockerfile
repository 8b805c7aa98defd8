# `regard serve` for the CPU: docs/serve.md says how to run it.
FROM python:3.12-slim

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)"
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve,convert]' && useradd --system serve

USER serve
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["regard", "serve", "--host", "0.0.0.0", "--token-file", "/token"]
