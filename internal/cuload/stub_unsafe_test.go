//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// A record is one call as C saw it: struct record of stub.c.
type record struct {
	seq, entry, symbol, nargs uint64
	args, outs                [cuapi.MaxArgs]uint64
}

// A state is struct state of stub.c, in the library's memory.
type state struct {
	entries, seq, quiet, version, procs, failAt, failCode, callback, misaligned uint64

	results [cuapi.NumEntries]uint64
	last    [cuapi.NumEntries]record
	trace   [256]record
}

// A stub is a copy of the stub library with a state of its own: the dynamic
// linker tells libraries apart by their files.
type stub struct {
	*state
	path string
}

var (
	stubDir   string // of this run, removed by TestMain
	stubImage = sync.OnceValues(buildStub)
)

// buildStub compiles testdata/stub.c. PURECUDA_STUB names a library that was
// built elsewhere, for runs under an emulator.
func buildStub() ([]byte, error) {
	path := os.Getenv("PURECUDA_STUB")
	if path == "" {
		path = filepath.Join(stubDir, "stub.so")
		out, err := exec.Command("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", path, "testdata/stub.c").CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("%w\n%s", err, out)
		}
	}
	return os.ReadFile(path)
}

// image returns the stub library's file.
func image(t testing.TB) []byte {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil && os.Getenv("CI") == "" && os.Getenv("PURECUDA_STUB") == "" {
		t.Skip("no gcc, and this is not CI")
	}
	b, err := stubImage()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// newStub writes the image to path, or to a path of its own, and loads it.
func newStub(t testing.TB, image []byte, path string) stub {
	t.Helper()
	if path == "" {
		path = filepath.Join(t.TempDir(), "libcuda.so.1")
	}
	write(t, path, image)
	h, err := dlopen(path)
	if err != nil {
		t.Fatal(err)
	}
	s := stub{path: path}
	addr := dlsym(h, "stub_state")
	s.state = *(**state)(unsafe.Pointer(&addr))
	if s.entries != cuapi.NumEntries || s.quiet != 0 || s.version != 13000 || s.procs != 1 {
		t.Fatalf("struct state differs between C and Go: %d %d %d %d", s.entries, s.quiet, s.version, s.procs)
	}
	return s
}

// openStub loads a stub and opens it through the production loader.
func openStub(t testing.TB) (stub, *Library) {
	t.Helper()
	s := newStub(t, image(t), "")
	lib, err := Open(s.path)
	if err != nil {
		t.Fatal(err)
	}
	return s, lib
}

func write(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

// hide returns the image without these symbols: their names are changed
// wherever they stand, among the exports and in cuGetProcAddress's list.
func hide(t testing.TB, image []byte, symbols ...string) []byte {
	t.Helper()
	image = bytes.Clone(image)
	for _, s := range symbols {
		if rename(image, s) < 2 {
			t.Fatalf("%s does not stand in both places", s)
		}
	}
	return image
}

// hideExports returns the image without these exports; cuGetProcAddress still
// finds the functions.
func hideExports(t testing.TB, image []byte, symbols ...string) []byte {
	t.Helper()
	image = bytes.Clone(image)
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	names := f.Section(".dynstr")
	for _, s := range symbols {
		if rename(image[names.Offset:names.Offset+names.Size], s) != 1 {
			t.Fatalf("%s is not exported", s)
		}
	}
	return image
}

func rename(image []byte, symbol string) (n int) {
	name := []byte("\x00" + symbol + "\x00")
	for at := 0; ; n++ {
		i := bytes.Index(image[at:], name)
		if i < 0 {
			return n
		}
		at += i + 1
		image[at] = 'x'
	}
}

// symbols lists the versioned symbols of the entry points.
func symbols(ids ...cuapi.ID) (list []string) {
	for _, id := range ids {
		for _, s := range cuapi.Entries[id].Symbols {
			list = append(list, s.Name)
		}
	}
	return list
}

// pattern is byte j of what the stub writes through an argument.
func pattern(entry cuapi.ID, arg, j int) byte {
	return byte(0x81 + 31*int(entry) + 7*arg + 13*j)
}

// A callback for the stub: every call runs f before it writes its outs.
func (s stub) onCall(f func()) {
	s.callback = uint64(purego.NewCallback(func(uintptr) uintptr { f(); return 0 }))
}

func TestMain(m *testing.M) {
	if os.Getenv("PURECUDA_TEST_OPEN") != "" {
		os.Exit(openChild())
	}
	var err error
	if stubDir, err = os.MkdirTemp("", "cuload"); err != nil {
		panic(err)
	}
	code := m.Run()
	os.RemoveAll(stubDir)
	os.Exit(code)
}
