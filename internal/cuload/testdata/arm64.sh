#!/bin/sh
# Runs this package's tests for arm64 under an emulator: needs
# aarch64-linux-gnu-gcc and qemu-aarch64-static. Arguments go to the test.
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
emulator="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
aarch64-linux-gnu-gcc -O2 -Wall -Werror -shared -fPIC -Wl,-Bsymbolic -o "$dir/stub.so" testdata/stub.c
for tags in "" purecuda_portable; do
	CGO_ENABLED=0 GOOS=linux GOARCH=arm64 go test -c -tags "$tags" -o "$dir/cuload.test" .
	PURECUDA_STUB="$dir/stub.so" PURECUDA_TEST_EXEC="$emulator" $emulator "$dir/cuload.test" "$@"
done
