# For machines without GPUs: docker build -f docker/cpu.Dockerfile -t areal-like:0.1.0-cpu .
FROM python:3.12-slim-bookworm
# A compiler for Triton's and Megatron's small helpers.
RUN apt-get update && apt-get install -y --no-install-recommends git g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /areal-like
COPY requirements requirements
COPY pyproject.toml README.md ./
COPY allocation allocation
COPY areal_like areal_like
RUN requirements/install cpu && rm -rf ~/.cache
COPY examples examples
ENV PATH=/areal-like/.venv/bin:$PATH
CMD ["areal-like", "--help"]
