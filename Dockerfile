# syntax=docker/dockerfile:1
# The server on a CPU. Build:  docker build -t specrag .
# Run, with models and knowledge bases in a volume and the key in a file:
#   docker run --rm -p 127.0.0.1:8000:8000 -v specrag:/var/lib/specrag \
#     -v "$PWD/api-key:/run/secrets/api-key:ro" -e SPECRAG_SERVE_API_KEY_FILE=/run/secrets/api-key specrag

FROM python:3.12.8-slim-bookworm@sha256:2199a62885a12290dc9c5be3ca0681d367576ab7bf037da120e564723292a2f0 AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /usr/local/lib/specrag
WORKDIR /src
# Everything by its hash, torch in its CPU build (the plain one brings gigabytes for GPUs); scripts/lock.sh writes the file.
COPY requirements.lock ./
RUN /usr/local/lib/specrag/bin/pip install --require-hashes --no-deps --requirement requirements.lock \
    --extra-index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY weights ./weights
RUN /usr/local/lib/specrag/bin/pip install --no-deps --no-build-isolation .

FROM python:3.12.8-slim-bookworm@sha256:2199a62885a12290dc9c5be3ca0681d367576ab7bf037da120e564723292a2f0
LABEL org.opencontainers.image.title="specrag" \
      org.opencontainers.image.description="OpenAI-compatible server for retrieval-augmented generation by speculation" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --system --gid 10001 specrag \
 && useradd --system --uid 10001 --gid specrag --home-dir /var/lib/specrag --create-home --shell /usr/sbin/nologin specrag
COPY --from=build /usr/local/lib/specrag /usr/local/lib/specrag
ENV PATH=/usr/local/lib/specrag/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/tmp/numba \
    SPECRAG_HOME=/var/lib/specrag/models \
    SPECRAG_SERVE_HOST=0.0.0.0 \
    SPECRAG_SERVE_KB_ROOT=/var/lib/specrag/kb
USER 10001:10001
WORKDIR /var/lib/specrag
VOLUME /var/lib/specrag
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# Without a key it refuses to start: SPECRAG_SERVE_API_KEY_FILE must name a file.
ENTRYPOINT ["specrag"]
CMD ["serve"]
