//go:build gpu

package cuload

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// On a real driver, cuGetProcAddress asked at the version of the manifest gives
// the very address that the library exports under the versioned name: the
// prototypes of the manifest are those of the symbols that are called.
func TestGPUSymbols(t *testing.T) {
	lib, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	h, err := dlopen(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for id := range cuapi.ID(cuapi.NumEntries) {
		e := cuapi.Entries[id]
		if e.Since() > lib.Version {
			continue
		}
		if lib.Symbols[id] != e.Symbol() {
			t.Errorf("%s was resolved to %q", e.Symbol(), lib.Symbols[id])
		}
		exported, name := export(h, id)
		asked, _ := lookup(lib.Table, id, lib.Version)
		if asked == 0 || exported == 0 {
			t.Logf("%s: exported %#x, asked %#x", e.Symbol(), exported, asked)
			continue
		}
		checked++
		if id != cuapi.IDGetProcAddress && (asked != exported || name != e.Symbol()) {
			t.Errorf("%s: cuGetProcAddress gives %#x, the export %s is at %#x", e.Symbol(), asked, name, exported)
		}
	}
	if checked < cuapi.NumEntries-5 {
		t.Errorf("only %d of %d entry points were compared", checked, cuapi.NumEntries)
	}
	t.Logf("%d of %d entry points compared, CUDA %d", checked, cuapi.NumEntries, lib.Version)
}
