# docker build --tag unisono [--build-arg TORCH_INDEX=URL] .
# TORCH_INDEX is the index of PyTorch's CPU builds or of those for a version of CUDA (pytorch.org names them). Without it, pip's own is
# used, where torch for x86-64 is a CUDA build. torch's CUDA wheels bring CUDA's libraries: the host needs its driver and the NVIDIA container toolkit only.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PYTHONUNBUFFERED=1
WORKDIR /workspace
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} torch==2.13.0
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[mpi,quantum,plan,report]"
COPY examples ./examples
CMD ["unisono", "doctor"]
