# Three images of one source: the service, the judge, and the MLflow server that compose.yaml starts.
#
#   docker build --target service -t parity-gate-service .
#   docker build --target judge --build-arg TORCH_INDEX=... -t parity-gate-judge .
#
# See docs/container.md. No container engine has built this yet.
# Exact versions: Python here, the operating system by its release, packages by constraints.txt.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY gate ./gate
RUN python -m venv /opt/gate \
 && /opt/gate/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM wheel AS service-packages
RUN /opt/gate/bin/python -m pip install --no-cache-dir -c constraints.txt \
    "$(ls /wheels/*.whl)[cpu,service,postgresql]"

# The index of PyTorch's CPU builds. The default index would install 7 GB of CUDA.
FROM wheel AS judge-packages
ARG TORCH_INDEX
RUN test -n "$TORCH_INDEX" \
 || { echo "set --build-arg TORCH_INDEX= to the index of PyTorch's CPU builds"; exit 2; }
RUN /opt/gate/bin/python -m pip install --no-cache-dir -c constraints.txt \
    --index-url "$TORCH_INDEX" torch
RUN /opt/gate/bin/python -m pip install --no-cache-dir -c constraints.txt \
    "$(ls /wheels/*.whl)[cpu,charts,data,export]"

FROM wheel AS registry-packages
RUN /opt/gate/bin/python -m pip install --no-cache-dir -c constraints.txt \
    mlflow "psycopg[binary]"

# The base of all three images: no compiler, and HOME is the volume.
FROM python:${PYTHON} AS plain
ENV PATH=/opt/gate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    HOME=/var/lib/gate
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/gate /run/gate

FROM plain AS registry
COPY --from=registry-packages /opt/gate /opt/gate
USER 10001:10001
WORKDIR /var/lib/gate
VOLUME /var/lib/gate
EXPOSE 5000
HEALTHCHECK --interval=15s --timeout=5s --start-period=90s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:5000/health', timeout=3)"]
CMD ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000"]

FROM plain AS judge
COPY --from=judge-packages /opt/gate /opt/gate
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["gate"]
CMD ["check", "--help"]

FROM plain AS service
COPY --from=service-packages /opt/gate /opt/gate
USER 10001:10001
WORKDIR /var/lib/gate
VOLUME /var/lib/gate
EXPOSE 8400
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8400/healthz', timeout=3)"]
CMD ["gate", "serve", "--host", "0.0.0.0", "--log-format", "json"]
