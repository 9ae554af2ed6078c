# Builds the wheel with its compiled kernels and serves: docker build -t graftlm . && docker run --rm -p 30000:30000 \
#   -e GRAFTLM_API_KEY=... graftlm --model demo --set 'server.api_key=${GRAFTLM_API_KEY}'
FROM python:3.11-bookworm AS build
WORKDIR /src
RUN pip install --no-cache-dir hatchling
COPY . .
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.11-slim-bookworm
# CPU builds of torch; with the index of CUDA builds instead, the image serves on GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir -c /tmp/constraints.txt --extra-index-url "$TORCH_INDEX" "$(ls /dist/*.whl)[cpu]"
RUN useradd --create-home graftlm
USER graftlm
WORKDIR /home/graftlm
EXPOSE 30000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health')"]
ENTRYPOINT ["graftlm", "serve", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--model", "demo"]
