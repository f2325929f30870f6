# Three images from one lock file: --target agent, accountant or fairshare (docs/images.md).
#
# A base is Debian's kind with python3 3.11 or newer and its venv module. Nothing is compiled; of the stages that install,
# /opt/gputally (what is imported) and /opt/program (what is ours) are taken over. Probes are the chart's, so there is no
# HEALTHCHECK.
ARG BASE=docker.io/library/python:3.12.15-slim-bookworm@sha256:54c85f3c47607a77f32adec749d3c81d1348bf25833671f512b26a9b6d778cb3

FROM ${BASE} AS tools
# Where packages come from, if not from PyPI: another index, or a folder of wheels.
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_QUIET=1 UV_PYTHON_DOWNLOADS=never UV_NO_CACHE=1
WORKDIR /src
RUN python3 -m venv /tools && /tools/bin/pip install "uv>=0.13,<0.14" "hatchling>=1.27,<2"
COPY uv.lock ./

# What each image imports: the locked versions, held to their hashes, wheels only; without their own tests and headers. An
# environment knows the path it was made at, so each is made where it will be, and put aside.
FROM tools AS files
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
# The lock alone decides; a project of that name is all uv wants beside it, and ours changes more often.
RUN printf '[project]\nname = "gputally"\nversion = "0"\nrequires-python = ">=3.11"\n' > pyproject.toml
RUN mkdir /files && for image in agent accountant fairshare; do \
        /tools/bin/uv export --quiet --frozen --no-emit-project --only-group $image --output-file needs.txt \
     && python3 -m venv --without-pip /opt/gputally \
     && /tools/bin/pip --python /opt/gputally/bin/python install --no-compile --only-binary :all: --require-hashes -r needs.txt \
     && find /opt/gputally/lib -type d \( -name tests -o -name include \) -prune -exec rm -rf {} + \
     && /opt/gputally/bin/python -m compileall -q -j 0 /opt/gputally/lib \
     && for site in /opt/gputally/lib/python*/site-packages; do echo /opt/program > $site/program.pth; done \
     && mv /opt/gputally /files/$image \
     || exit 1; \
    done

# The program is a layer of its own, the same in all three: a change of it installs nothing else anew.
FROM tools AS program
COPY pyproject.toml README.md LICENSE ./
COPY agent agent
COPY accountant accountant
COPY fairshare fairshare
COPY dashboards dashboards
COPY gputally gputally
RUN /tools/bin/pip install --no-deps --no-build-isolation --target /opt/program . \
 && printf '#!/opt/gputally/bin/python\nimport sys\nfrom gputally.__main__ import main\nsys.exit(main())\n' > /opt/program/bin/gputally

FROM ${BASE} AS runtime
ENV PATH=/opt/program/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
LABEL org.opencontainers.image.vendor="The gputally authors" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.url="https://gputally.dev" \
      org.opencontainers.image.documentation="https://gputally.dev"
USER 65532:65532
WORKDIR /
ENTRYPOINT ["gputally"]
CMD ["--help"]

# The chart runs it as root without capabilities, for the kubelet's socket and the spool on the node are root's.
FROM runtime AS agent
COPY --from=files /files/agent /opt/gputally
COPY --from=program /opt/program /opt/program
ARG VERSION=0.1.0
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="gputally agent" \
      org.opencontainers.image.description="Meters every GPU of a node per pod." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# Pango lays the PDFs out.
FROM runtime AS accountant
USER root
RUN apt-get update -qq \
 && apt-get install -qq -y --no-install-recommends libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-dejavu-core >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
USER 65532:65532
COPY --from=files /files/accountant /opt/gputally
COPY --from=program /opt/program /opt/program
ARG VERSION=0.1.0
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="gputally accountant" \
      org.opencontainers.image.description="Keeps the exact ledger of GPU time; serves usage, cost and reports." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

FROM runtime AS fairshare
COPY --from=files /files/fairshare /opt/gputally
COPY --from=program /opt/program /opt/program
ARG VERSION=0.1.0
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="gputally fairshare" \
      org.opencontainers.image.description="Turns the ledger's history into the weights of queues." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
