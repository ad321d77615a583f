# megalaunch in a container; docs/container.md says how to build and run it, scripts/container tries every step without Docker.
#
#   docker build -t megalaunch .
#   docker build -t megalaunch:cpu --build-arg BASE=debian:12-slim \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

# Any image of Debian 12 or Ubuntu 24.04 and later; torch brings its own CUDA libraries.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

# --- build: an environment in /opt/megalaunch, from the sources and constraints.txt
FROM ${BASE} AS build
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/megalaunch
ENV PATH=/opt/megalaunch/bin:${PATH} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# torch alone is the largest layer, and changes least.
COPY constraints.txt /src/
ARG TORCH_INDEX=
RUN python -m pip install --constraint /src/constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
ARG EXTRAS=train,data,sweep
COPY pyproject.toml README.md LICENSE /src/
COPY conf /src/conf
COPY recipes /src/recipes
COPY kernels /src/kernels
COPY docs/reference /src/docs/reference
COPY megalaunch /src/megalaunch
RUN python -m pip install --constraint /src/constraints.txt "/src[${EXTRAS}]" \
    && python -m compileall -q /opt/megalaunch/lib/python3*/site-packages/megalaunch

# --- development: what .devcontainer needs; scripts/run and scripts/test make the environment of the checkout themselves
FROM ${BASE} AS development
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git openssh-client procps python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG UID=1000
RUN useradd --create-home --non-unique --uid "${UID}" --shell /bin/bash developer
USER developer

# --- the image: the environment, a compiler for torch.compile and Triton, a user without rights
FROM ${BASE}
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates gcc libc6-dev openssh-client python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/megalaunch /opt/megalaunch
ARG UID=1000
RUN useradd --create-home --non-unique --uid "${UID}" --shell /bin/bash megalaunch \
    && mkdir -p /workspace /data \
    && chown "${UID}" /workspace /data
# Caches that any user of `docker run --user` may write.
ENV PATH=/opt/megalaunch/bin:${PATH} PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton
LABEL org.opencontainers.image.title=megalaunch org.opencontainers.image.licenses=Apache-2.0
USER megalaunch
WORKDIR /workspace
# SIGTERM saves a checkpoint and ends with exit code 75.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5m --timeout=60s CMD ["megalaunch", "validate-config", "recipe=quickstart"]
ENTRYPOINT ["megalaunch"]
CMD ["doctor"]
