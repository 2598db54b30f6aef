# Shoestring in a container, for a CPU and for NVIDIA GPUs, from the same steps and the same requirements.lock:
#
#   docker build -t shoestring .                         CPU
#   docker build -t shoestring:cuda --target cuda .      GPU; run it with --gpus all
#   docker run --rm -it -v "$PWD:/work" shoestring demo quick=true
#
# CUDA libraries come with torch's wheels, the driver from the host. On x86-64 the usual wheels of torch bring CUDA along, also
# for the CPU image; PIP_INDEX_URL or PIP_EXTRA_INDEX_URL (as --build-arg) can name an index with smaller ones.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS base
# The C++ compiler makes the CPU kernels at their first use; Triton compiles its launchers with it.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# torch first and alone: a change of the sources does not install it again.
COPY requirements.lock ./
RUN pip install -c requirements.lock torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c requirements.lock '.[serve,grammar,bench,data]' && rm -rf /src
RUN useradd --create-home user && mkdir -p /work /cache && chown user /work /cache
USER user
ENV SHOESTRING_CACHE=/cache
VOLUME /cache
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["shoestring"]
CMD ["--help"]

FROM base AS cuda
USER root
COPY requirements.lock /tmp/
RUN pip install -c /tmp/requirements.lock triton && rm /tmp/requirements.lock
USER user

FROM base AS cpu
