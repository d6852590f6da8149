# For NVIDIA Hopper GPUs and CUDA 13: docker build -f docker/gpu.Dockerfile -t areal-like:0.1.0-gpu .
# Transformer Engine is compiled here, which takes about 15 minutes and needs no GPU.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    git g++ make python3.12-dev python3.12-venv libibverbs1 wget && rm -rf /var/lib/apt/lists/*
WORKDIR /areal-like
ENV NVTE_CUDA_ARCHS=90 NVTE_FRAMEWORK=pytorch
COPY requirements requirements
COPY pyproject.toml README.md ./
COPY allocation allocation
COPY areal_like areal_like
RUN requirements/install cpu && requirements/install gpu && requirements/install jobs && rm -rf ~/.cache
COPY examples examples
ENV PATH=/areal-like/.venv/bin:$PATH
CMD ["areal-like", "--help"]
