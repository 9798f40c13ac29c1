package cuload

import (
	"errors"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// The message has a line for each attempt, whatever the reasons and paths are.
func TestErrorMessage(t *testing.T) {
	for _, c := range []struct {
		attempts []Attempt
		want     string
	}{
		{nil, "no usable CUDA driver library"},
		{[]Attempt{{"", &PlatformError{"plan9", "386"}}}, "no usable CUDA driver library: there is no CUDA driver for plan9/386"},
		{[]Attempt{{"/a", &InitError{"cuInit", cuapi.StubLibrary}}},
			"no usable CUDA driver library: /a: cuInit failed: CUresult 34 (the toolkit's stub library, not a driver)"},
		{[]Attempt{{"/a", &LinkError{"two\n\tlines"}}, {"/b\n", &MissingError{[]string{"cuMemAlloc_v2", "cuMemFree_v2"}}}, {"/c", &VersionError{9020}}},
			"no usable CUDA driver library:\n" +
				"\t/a: two lines\n" +
				"\t\"/b\\n\": missing symbols: cuMemAlloc_v2, cuMemFree_v2\n" +
				"\t/c: the driver is too old: it serves CUDA 9.2, and purecuda needs CUDA 11.0 (driver R450) or newer"},
	} {
		if got := (&Error{c.attempts}).Error(); got != c.want {
			t.Errorf("got  %q\nwant %q", got, c.want)
		}
	}
}

// The causes are found through the error.
func TestErrorCauses(t *testing.T) {
	var err error = &Error{[]Attempt{{"/a", &LinkError{"no"}}, {"/b", &PlatformError{"plan9", "386"}}}}
	var link *LinkError
	if !errors.As(err, &link) || !errors.Is(err, errors.ErrUnsupported) {
		t.Error("a cause is hidden")
	}
	if errors.Is(&Error{[]Attempt{{"/a", link}}}, errors.ErrUnsupported) {
		t.Error("a cause that is not there is found")
	}
}

func TestBootSymbol(t *testing.T) {
	if got := cuapi.Entries[cuapi.IDInit].Symbol(); got != bootSymbol || !strings.HasPrefix((&MissingError{[]string{got}}).Error(), "not a CUDA driver") {
		t.Errorf("cuInit is called %s", got)
	}
}
