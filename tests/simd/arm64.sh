#!/usr/bin/env bash
# Set up what runs 64-bit ARM code on this x86-64 Debian or Ubuntu: qemu, a Python and the packages of the simd engine,
# in the versions of the Python that runs the tests: PYTHON, or else python3. Nothing is installed; remove the directory
# to undo it. Afterwards:
#     ONDEVICE_ARM64=DIRECTORY python -m pytest tests/simd/machines/test_arm_emulated.py
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: [PYTHON=...] $0 DIRECTORY" >&2; exit 2; }
python="$(command -v "${PYTHON:-python3}")" || { echo "$0: no ${PYTHON:-python3} here" >&2; exit 2; }
packages=(numpy tokenizers jinja2 markupsafe)
versions="$("$python" -c "
import sys
from importlib.metadata import version
print(*(f'{name}=={version(name)}' for name in sys.argv[1:]))" "${packages[@]}" 2>/dev/null)" || {
    echo "$0: $python lacks one of ${packages[*]}: set PYTHON to the one that runs the tests" >&2
    exit 2
}
mkdir -p "$1" && cd "$1"
apt="$PWD/apt"
mkdir -p "$apt/lists/partial" "$apt/archives/partial" root qemu site && : >"$apt/status"
cat >"$apt/conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
CONF
apt-get download qemu-user-static
APT_CONFIG="$apt/conf" apt-get update
APT_CONFIG="$apt/conf" apt-get download libc6 python3.11-minimal libpython3.11-minimal \
    libpython3.11-stdlib libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libssl3 libuuid1 libcrypt1
dpkg-deb -x qemu-user-static_*.deb qemu
for package in *_arm64.deb; do dpkg-deb -x "$package" root; done
read -ra wanted <<<"$versions"
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --dest wheels \
    --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 \
    "${wanted[@]}"
for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" site; done
