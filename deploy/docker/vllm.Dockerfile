# vLLM 0.32.0 with ELDR's patch series, for prefill and decode workers. Build from the repository's root:
#   docker build -f deploy/docker/vllm.Dockerfile -t eldr-vllm:0.32.0 .
FROM python:3.11.11-bookworm AS build
WORKDIR /src
COPY . .
# A pure wheel for any Python: on a GPU the kernels are Triton's.
RUN ELDR_SKIP_EXT=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v0.32.0
COPY --from=build /wheels /wheels
# The patch tool refuses a tree that is not exactly vLLM 0.32.0, and verifies what it wrote.
RUN python3 -m pip install --no-cache-dir --no-deps nixl==1.5.2 nixl-cu13==1.5.1 /wheels/eldr-*.whl \
    && eldr patch apply \
    && eldr patch verify \
    && rm -r /wheels
EXPOSE 8000 5600
