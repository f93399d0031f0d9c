#!/bin/sh
# Builds /opt/swarm, the virtual environment of the images; run by the Dockerfile in two steps, for its cache.
#   install.sh dependencies    from /src/pyproject.toml alone, with what `report` needs; torch from TORCH_INDEX, if that is
#                              set
#   install.sh project         from the source in /src
set -eu

case "$1" in
dependencies)
    python3 -m venv /opt/swarm
    python3 -c "import tomllib
with open('/src/pyproject.toml', 'rb') as file:
    project = tomllib.load(file)['project']
print(*project['dependencies'], *project['optional-dependencies']['figures'], sep='\n')" >/tmp/requirements.txt
    if [ -n "${TORCH_INDEX:-}" ]; then
        grep '^torch' /tmp/requirements.txt >/tmp/torch.txt
        /opt/swarm/bin/pip install --index-url "$TORCH_INDEX" -r /tmp/torch.txt
    fi
    /opt/swarm/bin/pip install -r /tmp/requirements.txt
    ;;
project)
    /opt/swarm/bin/pip install --no-deps /src
    ;;
*)
    echo "install.sh: $1 is neither dependencies nor project" >&2
    exit 2
    ;;
esac
