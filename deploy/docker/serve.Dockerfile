# A cache server: docker build -f deploy/docker/serve.Dockerfile -t kvladder-serve:0.1.0 .
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
WORKDIR /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON}
ARG EXTRAS=encryption,redis,object,events,prometheus,nixl
# NIXL imports torch, and needs none of its CUDA: a CPU build from here makes the image smaller
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
        "$(echo /wheels/kvladder-*.whl)[${EXTRAS}]" torch==2.13.0 \
    && kvladder --version
USER 10001:10001
EXPOSE 7470
EXPOSE 9480
ENTRYPOINT ["kvladder", "serve"]
CMD ["/etc/kvladder/server.yaml"]
