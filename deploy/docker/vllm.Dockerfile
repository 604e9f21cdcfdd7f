# vLLM with kvladder: docker build -f deploy/docker/vllm.Dockerfile -t kvladder-vllm:0.1.0 .
ARG VLLM=vllm/vllm-openai:v0.33.0

FROM ${VLLM} AS build
COPY . /src
WORKDIR /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM}
# libraries of the tiers and codecs that stacks in this image may name
ARG EXTRAS=encryption,redis,object,events,prometheus,nixl
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir "$(echo /wheels/kvladder-*.whl)[${EXTRAS}]" \
    && kvladder --version
USER 10001:10001
ENTRYPOINT ["vllm", "serve"]
