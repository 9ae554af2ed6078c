# Builds the wheel with its compiled kernels, and serves:
#   docker build -t graftlm .
#   docker run --rm -p 30000:30000 -e GRAFTLM_API_KEY=... graftlm
#   docker run --rm -p 30000:30000 -e GRAFTLM_API_KEY=... -v /models:/models:ro graftlm /etc/graftlm.yaml --model /models/Qwen3-8B
FROM python:3.11-bookworm AS build
WORKDIR /src
RUN pip install --no-cache-dir hatchling
COPY . .
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.11-slim-bookworm
# CPU builds of torch; an index of CUDA builds makes an image for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /install
COPY constraints.txt .
COPY --from=build /dist dist
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt "$(ls dist/*.whl)[cpu,otlp]"
# Other machines reach the server, so it needs a key; without the variable it does not start.
RUN echo 'server: {host: 0.0.0.0, port: 30000, api_key: "${GRAFTLM_API_KEY}"}' > /etc/graftlm.yaml
RUN useradd --create-home graftlm
USER graftlm
WORKDIR /home/graftlm
EXPOSE 30000
HEALTHCHECK --start-period=120s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health')"]
ENTRYPOINT ["graftlm", "serve"]
CMD ["/etc/graftlm.yaml"]
