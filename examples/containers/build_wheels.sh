#!/bin/bash
# All that an image needs, as a folder of wheels: build_wheels.sh FOLDER, in the root of a checkout,
# with g++, make and the headers of this Python. `pip install --no-index --find-links FOLDER ...` then
# needs no network. The extension has the kernels of every instruction set: the image runs anywhere.
set -euo pipefail

wheels=${1:?give the folder of the wheels}
python=${PYTHON:-python3}

$python -m pip install --no-cache-dir -r requirements/build.txt -r requirements/run.txt \
    -r requirements/horovod.txt -c requirements/transitive.txt
$python -m pip wheel --no-cache-dir --wheel-dir "$wheels" -r requirements/run.txt \
    -r requirements/horovod.txt 'typer>=0.12' 'rich>=13' \
    -c requirements/demo.txt -c requirements/transitive.txt
# Horovod's wheel takes minutes. One that lies in the folder already is kept: it must be of this
# Python and torch, as the one that the set-up of this checkout keeps in ~/.cache/loft_hvd.
if ! compgen -G "$wheels/horovod-*.whl" > /dev/null; then
    # Horovod 0.28.1 asks for C++14, torch's headers for C++20: the override settles that.
    CMAKE_TOOLCHAIN_FILE=$PWD/cmake/horovod/toolchain.cmake HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        $python -m pip wheel --no-build-isolation --no-deps --no-cache-dir --wheel-dir "$wheels" \
        -r requirements/horovod-version.txt
fi
LOFT_HVD_LEVELS=${LOFT_HVD_LEVELS:-all} $python -m pip wheel --no-build-isolation --no-deps --wheel-dir "$wheels" .
