# One image for broker, agent and command line, made from the locked dependencies.
#   docker build -t kubelend .
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Only wheels: nothing is compiled, here or later. pip itself stays outside of what is copied.
RUN python -m venv --without-pip /opt/kubelend
COPY requirements.lock /src/
RUN pip --python /opt/kubelend/bin/python install --only-binary :all: --require-hashes --requirement /src/requirements.lock
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip --python /opt/kubelend/bin/python install --no-deps --no-build-isolation /src \
    && pip --python /opt/kubelend/bin/python uninstall --yes setuptools

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Kubelend" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kubelend /opt/kubelend
ENV PATH=/opt/kubelend/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number, so that Kubernetes can see that it is not root. Nothing in the image is this user's.
USER 65532:65532
WORKDIR /tmp
EXPOSE 8443 8444 8080 8081
# It handles SIGTERM itself, so no other process has to stand before it.
ENTRYPOINT ["kubelend"]
CMD ["--help"]
