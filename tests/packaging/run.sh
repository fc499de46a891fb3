#!/usr/bin/env bash
# Installs the project with pip in throw-away environments, as users do, and uses it. `run.sh` runs all scenarios, `run.sh a h` two.
#
# CI_TORCH: the torch to install, as a version. PYTHON: what makes the environments. PACKAGING_CUDA_PYTHON: the Python of an
# environment with a CUDA build of torch, accelerate and pip, for (e) and (g); it is only read.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "$0")/../.." && pwd)
check=$root/tests/packaging/check.py
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work" # outside the source tree, so that the installed package is the one imported

unset PYTHONPATH CXX CUDA_HOME CUDA_PATH CONDA_PREFIX TORCH_CUDA_ARCH_LIST LOCALSGD_EXT_BUILD
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_CONSTRAINT=$work/constraints.txt
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
echo "torch==${CI_TORCH:-2.13.0}" > "$PIP_CONSTRAINT"

fail() { echo "FAILED: $*"; exit 1; }
not_run() { echo "$*" > "$work/why"; exit 77; }
# expect COUNT TEXT FILE: TEXT is on exactly COUNT lines of FILE.
expect() {
    local found; found=$(grep -cF -- "$2" "$3" || true)
    [ "$found" -eq "$1" ] || { cat "$3"; fail "'$2' is on $found lines of $(basename "$3"), not on $1"; }
}
empty() { [ -z "$(ls -A "$1")" ] || fail "$1 holds $(ls -A "$1")"; }

# copy NAME: a fresh copy of the files git knows, since pip builds inside the folder it is given.
copy() {
    mkdir -p "$work/source/$1"
    (cd "$root" && git ls-files -z | xargs -0 cp --parents -t "$work/source/$1")
}

# derive NAME [PYTHON]: an environment that sees the packages of another one (default: the one with torch), and an empty cache.
derive() {
    local from=${2:-$work/base/bin/python} packages
    packages=$("$from" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$from" -m venv --without-pip "$work/$1"
    echo "$packages" > "$(site_packages "$1")/base.pth"
    mkdir "$work/$1-cache"
}
site_packages() { "$work/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# pip NAME ARGUMENTS...: pip in that environment. use NAME [PROGRAM...]: what check.py, or PROGRAM, says there.
pip() { "$work/$1/bin/python" -m pip "${@:2}"; }
use() {
    [ $# -gt 1 ] || set -- "$1" "$check"
    LOCALSGD_EXT_CACHE=$work/$1-cache timeout 300 "$work/$1/bin/python" "${@:2}" > "$work/$1-use.log" 2>&1 || {
        cat "$work/$1-use.log"
        fail "exit status, or still not done"
    }
}
averaged() { expect "${3:-1}" "averaged with backend $2" "$work/$1-use.log"; } # averaged NAME BACKEND [RANKS]
silent() { expect 0 "localsgd_ext" "$work/$1-use.log"; }
progress() { expect 1 "building the native engine" "$work/$1-use.log"; expect 1 " done in " "$work/$1-use.log"; }

# path_without PATTERNS...: a folder with links to the system's tools, save these.
path_without() {
    local folder; folder=$(mktemp -d -p "$work")
    ln -sf /bin/* "$folder"
    ln -sf /usr/bin/* "$folder"
    (cd "$folder" && rm -f $* && pwd) # unquoted, since these are patterns
}
what_a="with torch: an install without flags compiles"
scenario_a() {
    derive a; copy a
    pip a install -q ./source/a
    ls "$(site_packages a)"/localsgd_ext/_native*.so
    use a; averaged a native; silent a
    empty a-cache
}
what_b="without torch: installed along, built on first use"
scenario_b() {
    "${PYTHON:-python3}" -m venv b; copy b; mkdir b-cache
    pip b install -v ./source/b > b-install.log 2>&1
    expect 1 "not built now, but on first use (no torch in the environment" b-install.log
    use b; averaged b native; progress b
    use b; averaged b native; silent b
}
what_c="without a compiler: installs, and goes on with PyTorch"
scenario_c() {
    local tools; derive c; copy c
    tools=$(path_without 'c++*' 'g++*' 'gcc*' 'clang*' cc nvcc)
    PATH=$work/c/bin:$tools pip c install -v ./source/c > c-install.log 2>&1
    expect 1 "the native engine is not built now, but on first use (no C++ compiler" c-install.log
    PATH=$work/c/bin:$tools use c; averaged c torch
    expect 1 "goes on with the PyTorch engine" c-use.log
    expect 1 "no C++ compiler: \$CXX is not set to one, and none of c++, g++, clang++ is on PATH" c-use.log
}
what_d="a broken compiler: its words are shown, LOCALSGD_EXT_BUILD=cpu fails"
scenario_d() {
    derive d; copy d
    printf '#!/bin/sh\necho "fatal error: out of ink" >&2\nexit 1\n' | install -m 755 /dev/stdin broken-c++
    export CXX=$work/broken-c++
    ! LOCALSGD_EXT_BUILD=cpu pip d install -v ./source/d > d-forced.log 2>&1 || fail "installed with LOCALSGD_EXT_BUILD=cpu"
    grep -q "fatal error: out of ink" d-forced.log || fail "the compiler's words are missing"
    pip d install -v ./source/d > d-install.log 2>&1
    expect 1 "the native engine is not built now" d-install.log
    expect 1 "fatal error: out of ink" d-install.log
    use d; averaged d torch
    expect 1 "fatal error: out of ink" d-use.log
    expect 1 "goes on with the PyTorch engine" d-use.log
}
what_e="CUDA torch, nvcc as a script on PATH, no GPU used: the CUDA kernels are compiled and load, without nvcc too"
scenario_e() {
    [ -n "${PACKAGING_CUDA_PYTHON:-}" ] || not_run "PACKAGING_CUDA_PYTHON is not set"
    local nvcc; nvcc=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | head -n 1)
    [ -n "$nvcc" ] || not_run "there is no nvcc"
    derive e "$PACKAGING_CUDA_PYTHON"; copy e
    mkdir wrapper
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$nvcc" | install -m 755 /dev/stdin wrapper/nvcc
    e/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > e-constraints.txt
    export PATH=$work/wrapper:/usr/bin:/bin CUDA_VISIBLE_DEVICES=
    PIP_CONSTRAINT=$work/e-constraints.txt pip e install -q ./source/e
    expect 1 '"flavour": "cuda"' "$(site_packages e)/localsgd_ext/_native.json"
    use e; averaged e native; silent e
    # Where it runs, no nvcc is on PATH and other GPUs are asked for: the binary is used as it is, CUDA kernels and all.
    export PATH=/usr/bin:/bin TORCH_CUDA_ARCH_LIST=8.6
    use e; averaged e native; silent e
    use e e/bin/localsgd-ext doctor
    expect 1 "for CUDA tensors:   native: $(site_packages e)/localsgd_ext/_native" e-use.log
    empty e-cache
}
what_f="sdist, wheel from it, installed elsewhere"
scenario_f() {
    derive f; derive f-elsewhere; copy f
    (cd source/f && find csrc localsgd_ext setup.py -type f) > f-expected.log
    f/bin/python -m build --sdist --outdir f-sdist ./source/f > f-sdist.log 2>&1
    tar -tf f-sdist/*.tar.gz > f-contents.log
    while read -r file; do
        grep -q "^[^/]*/$file\$" f-contents.log || fail "the sdist lacks $file"
    done < f-expected.log
    pip f wheel -q --no-cache-dir --no-deps --wheel-dir f-wheel f-sdist/*.tar.gz
    pip f-elsewhere install -q f-wheel/*.whl
    use f-elsewhere; averaged f-elsewhere native; silent f-elsewhere
    empty f-elsewhere-cache
}
what_g="torch exchanged under an installed binary: rebuilt"
scenario_g() {
    [ -d a ] || scenario_a
    derive g "${PACKAGING_CUDA_PYTHON:-}"
    cp -r "$(site_packages a)/localsgd_ext" "$(site_packages g)"
    if [ -z "${PACKAGING_CUDA_PYTHON:-}" ]; then
        echo "(g) has one torch only: the installed binary's note is edited instead, since PACKAGING_CUDA_PYTHON is not set" > notes
        sed -i 's/"key": "torch-/"key": "torch-0-/' "$(site_packages g)/localsgd_ext/_native.json"
    fi
    LOCALSGD_EXT_BUILD=cpu use g; averaged g native; progress g
    expect 0 "undefined symbol" g-use.log
}
what_h="two ranks on an empty cache build once; a build that was killed blocks nobody"
scenario_h() {
    derive h; copy h
    LOCALSGD_EXT_BUILD=off pip h install -q ./source/h
    use h -m torch.distributed.run --standalone --nproc-per-node=2 "$check"
    averaged h native 2; progress h
    rm -r h-cache; mkdir h-cache
    LOCALSGD_EXT_CACHE=$work/h-cache setsid h/bin/python "$check" > h-killed.log 2>&1 &
    local killed=$! begun=$SECONDS
    until pgrep -s "$killed" 'cc1plus|clang' > /dev/null; do
        kill -0 "$killed" 2>/dev/null && [ $((SECONDS - begun)) -lt 60 ] || { cat h-killed.log; fail "no compiler was started"; }
        sleep 0.1
    done
    kill -KILL -- "-$killed"
    expect 0 " done in " h-killed.log
    use h; averaged h native; progress h
}
what_i="ninja installed, but not on PATH"
scenario_i() {
    local tools; derive i; copy i
    pip i install -q ninja
    tools=$(path_without ninja)
    PATH=$tools pip i install -q ./source/i
    PATH=$tools use i; averaged i native; silent i
    rm "$(site_packages i)"/localsgd_ext/_native*
    PATH=$tools use i; averaged i native; progress i
}

echo "== an environment with torch==${CI_TORCH:-2.13.0}"
"${PYTHON:-python3}" -m venv base
pip base install -qq torch accelerate build
passed=0 failed=0
for name in ${*:-a b c d e f g h i}; do
    what=what_$name begun=$SECONDS status=0
    # In the background, since bash forgets `set -e` inside a condition.
    "scenario_$name" > "$name.log" 2>&1 &
    wait $! || status=$?
    case $status in
        0) passed=$((passed + 1)); echo "ok ($name) ${!what}, $((SECONDS - begun)) s" ;;
        77) echo "NOT RUN ($name): $(cat why)" ;;
        *) failed=$((failed + 1)); echo "FAILED ($name) ${!what}:"; tail -n 60 "$name.log" | sed 's/^/    /' ;;
    esac
    [ ! -f notes ] || { cat notes; rm notes; }
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
