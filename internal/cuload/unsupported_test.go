//go:build !(linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)) && !(windows && (amd64 || arm64))

package cuload

import (
	"errors"
	"testing"
)

func TestUnsupported(t *testing.T) {
	lib, err := Open("")
	var p *PlatformError
	if lib != nil || !errors.As(err, &p) || !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v, %v", lib, err)
	}
}
