//go:build !(linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)) && !(windows && (amd64 || arm64))

package cuload

import "runtime"

type searcher struct{}

var system searcher

func (searcher) open(string) (*Library, error) {
	return nil, &Error{[]Attempt{{Err: &PlatformError{runtime.GOOS, runtime.GOARCH}}}}
}
