# The router and the llm-d coordinator: Python without torch. Build from the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t eldr-router .
FROM python:3.11.11-bookworm AS build
WORKDIR /src
COPY . .
# A compiler is in this stage: eldr._native is built; without torch eldr._C is not, and is not needed.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.11-slim-bookworm
COPY --from=build /wheels /wheels
COPY requirements/engine-cpu.lock /constraints.txt
RUN pip install --no-cache-dir --constraint /constraints.txt \
        "eldr[serve,k8s] @ file://$(ls /wheels/eldr-*.whl)" PyYAML==6.0.4 \
    && rm -r /wheels /constraints.txt \
    && useradd --uid 10001 --no-create-home eldr
USER 10001
EXPOSE 30000 9090
ENTRYPOINT ["eldr"]
CMD ["serve", "--config", "/etc/eldr/router.toml"]
