//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// routes are the ways to find symbols, by what a library lacks for the others.
var routes = []struct {
	name string
	lack []cuapi.ID
}{
	{"cuGetProcAddress_v2", nil},
	{"cuGetProcAddress", []cuapi.ID{cuapi.IDGetProcAddressV2}},
	{"exports", []cuapi.ID{cuapi.IDGetProcAddressV2, cuapi.IDGetProcAddress}},
}

func TestOpen(t *testing.T) {
	s, lib := openStub(t)
	if lib.Path != s.path || lib.Version != 13000 {
		t.Errorf("path %q, version %d", lib.Path, lib.Version)
	}
	for _, e := range cuapi.Entries {
		if !lib.Table.Has(e.ID) || lib.Symbols[e.ID] != e.Symbol() {
			t.Errorf("%s: present %v as %q", e.Name, lib.Table.Has(e.ID), lib.Symbols[e.ID])
		}
	}
	if s.last[cuapi.IDInit].seq == 0 {
		t.Error("cuInit was not called")
	}
}

// A library has one key by whatever path, and no other library has it.
func TestFault25KeyOfALibrary(t *testing.T) {
	s, lib := openStub(t)
	dir := t.TempDir()
	link, hard := filepath.Join(dir, "link.so"), filepath.Join(filepath.Dir(s.path), "hard.so")
	if err := os.Symlink(s.path, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(s.path, hard); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{s.path, filepath.Dir(s.path) + "/./libcuda.so.1", link, hard} {
		again, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if again.Key == 0 || again.Key != lib.Key {
			t.Errorf("%s: key %#x, want %#x", path, again.Key, lib.Key)
		}
	}
	if _, other := openStub(t); other.Key == 0 || other.Key == lib.Key {
		t.Errorf("another library has key %#x, this one %#x", other.Key, lib.Key)
	}
}

// One symbol is absent on this driver: an optional one is nil alone, a
// required one fails Open by its name.
func TestOneSymbolAbsent(t *testing.T) {
	whole := image(t)
	for _, route := range routes {
		for _, procs := range []uint64{1, 2} { // how the driver says no
			rest := hide(t, whole, symbols(route.lack...)...)
			for _, e := range cuapi.Entries {
				if slices.Contains(route.lack, e.ID) {
					continue
				}
				s := newStub(t, hide(t, rest, symbols(e.ID)...), "")
				s.procs = procs
				lib, err := Open(s.path)
				if e.Required {
					var m *MissingError
					if !errors.As(err, &m) || !reflect.DeepEqual(m.Symbols, []string{e.Symbol()}) {
						t.Errorf("%s without %s: %v", route.name, e.Symbol(), err)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s without %s: %v", route.name, e.Symbol(), err)
					continue
				}
				for _, other := range cuapi.Entries {
					want := other.ID != e.ID && !slices.Contains(route.lack, other.ID)
					if lib.Table.Has(other.ID) != want || (lib.Symbols[other.ID] != "") != want {
						t.Errorf("%s without %s: %s present %v, %q", route.name, e.Symbol(), other.Name, !want, lib.Symbols[other.ID])
					}
				}
			}
			if len(route.lack) == 2 {
				break // nobody to say no
			}
		}
	}
}

// The loader asks the driver for what the library does not export.
func TestLookup(t *testing.T) {
	var rest []cuapi.ID
	for _, e := range cuapi.Entries {
		if !slices.Contains(bootIDs, e.ID) {
			rest = append(rest, e.ID)
		}
	}
	for _, route := range routes[:2] {
		s := newStub(t, hide(t, hideExports(t, image(t), symbols(rest...)...), symbols(route.lack...)...), "")
		lib, err := Open(s.path)
		if err != nil {
			t.Errorf("%s: %v", route.name, err)
			continue
		}
		for _, id := range rest {
			if e := cuapi.Entries[id]; !lib.Table.Has(id) || lib.Symbols[id] != e.Symbol() {
				t.Errorf("%s: %s present %v as %q", route.name, e.Name, lib.Table.Has(id), lib.Symbols[id])
			}
		}
	}
}

// A driver that refuses every lookup, and leaves garbage as the address, is
// served by its exports.
func TestLookupRefused(t *testing.T) {
	for _, route := range routes[:2] {
		s := newStub(t, hide(t, image(t), symbols(route.lack...)...), "")
		s.procs = 0
		s.results[cuapi.IDGetProcAddress], s.results[cuapi.IDGetProcAddressV2] = 500, 500
		lib, err := Open(s.path)
		if err != nil {
			t.Errorf("%s: %v", route.name, err)
			continue
		}
		lib.Table.CtxSynchronize()
		if s.last[cuapi.IDCtxSynchronize].seq == 0 {
			t.Errorf("%s: the call went elsewhere", route.name)
		}
	}
}

// An older driver has the older of two symbols, and that is what is called.
func TestOlderSymbol(t *testing.T) {
	old := cuapi.IDStreamWriteValue32
	e := cuapi.Entries[old]
	test := func(name string, b []byte, version uint64) {
		t.Helper()
		s := newStub(t, b, "")
		s.version = version
		lib, err := Open(s.path)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if lib.Symbols[old] != e.Symbols[1].Name {
			t.Errorf("%s: found %s", name, lib.Symbols[old])
		}
		lib.Table.StreamWriteValue32(1, 2, 3, 4)
		if got := s.last[old].symbol; got != 1 {
			t.Errorf("%s: called symbol %d", name, got)
		}
	}
	for _, route := range routes {
		b := hide(t, image(t), symbols(route.lack...)...)
		test(route.name, hide(t, b, e.Symbols[0].Name), 13000)
	}
	test("by the driver's version", image(t), uint64(e.Symbols[0].Since)-10)
}

// The first calls fail, or the driver is too old.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name    string
		set     func(s stub)
		want    error
		mention string
	}{
		{"stub library", func(s stub) { s.results[cuapi.IDInit] = 34 }, &InitError{"cuInit", cuapi.StubLibrary}, "stub library"},
		{"no device", func(s stub) { s.results[cuapi.IDInit] = 100 }, &InitError{"cuInit", cuapi.NoDevice}, "no CUDA device"},
		{"mismatch", func(s stub) { s.results[cuapi.IDInit] = 803 }, &InitError{"cuInit", cuapi.SystemDriverMismatch}, "different driver versions"},
		{"not ready", func(s stub) { s.results[cuapi.IDInit] = 802 }, &InitError{"cuInit", cuapi.SystemNotReady}, "not ready"},
		{"version", func(s stub) { s.results[cuapi.IDDriverGetVersion] = 3 }, &InitError{"cuDriverGetVersion", cuapi.NotInitialized}, "cuDriverGetVersion failed"},
		{"too old", func(s stub) { s.version = 10020 }, &VersionError{10020}, "CUDA 10.2"},
	} {
		s := newStub(t, image(t), "")
		c.set(s)
		lib, err := Open(s.path)
		var e *Error
		if lib != nil || !errors.As(err, &e) {
			t.Errorf("%s: %v, %v", c.name, lib, err)
			continue
		}
		want := &Error{[]Attempt{{s.path, c.want}}}
		if !reflect.DeepEqual(e, want) {
			t.Errorf("%s: %v, want %v", c.name, e, want)
		}
		if !strings.Contains(err.Error(), c.mention) {
			t.Errorf("%s: %q does not mention %q", c.name, err, c.mention)
		}
	}
	// The oldest driver served is served.
	s := newStub(t, image(t), "")
	s.version = MinVersion
	if _, err := Open(s.path); err != nil {
		t.Error(err)
	}
}

// header makes an ELF header like the stub's with one byte changed.
func header(stub []byte, at int, b byte) []byte {
	h := bytes.Clone(stub[:4096])
	h[at] = b
	return h
}

// bad are files that are no driver, each with a part of its reason.
func bad(t *testing.T) []struct {
	name, reason string
	make         func(path string)
} {
	whole := image(t)
	file := func(b []byte) func(string) { return func(path string) { write(t, path, b) } }
	check := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	return []struct {
		name, reason string
		make         func(path string)
	}{
		{"absent", "no such file or directory", func(string) {}},
		{"directory", "not a regular file: d", func(path string) { check(os.MkdirAll(path, 0o755)) }},
		{"pipe", "not a regular file: p", func(path string) {
			check(os.MkdirAll(filepath.Dir(path), 0o755))
			check(syscall.Mkfifo(path, 0o644))
		}},
		{"dangling link", "no such file or directory", func(path string) {
			check(os.MkdirAll(filepath.Dir(path), 0o755))
			check(os.Symlink("nowhere", path))
		}},
		{"link to itself", "too many levels of symbolic links", func(path string) {
			check(os.MkdirAll(filepath.Dir(path), 0o755))
			check(os.Symlink(filepath.Base(path), path))
		}},
		{"empty", "too short", file(nil)},
		{"garbage", "no ELF header", file(bytes.Repeat([]byte("garbage "), 100))},
		{"32-bit", "wrong ELF class: ELFCLASS32", file(header(whole, 4, 1))},
		{"big-endian", "wrong byte order", file(header(whole, 5, 2))},
		{"another machine", "wrong machine: EM_S390", file(header(whole, 18, 22))},
		{"an object", "not a shared library: ET_REL", file(header(whole, 16, 1))},
		{"odd headers", "damaged: program headers", file(header(whole, 54, 1))},
		{"headers beyond the end", "ends within its program headers", file(header(whole, 35, 0x7f))},
		{"cut short", "ends within a segment", file(whole[:len(whole)/2])},
		{"segment beyond the end", "ends within a segment", file(segment(whole, 1, 15, 0x7f))}, // the top of its offset
		{"no dynamic section", "", file(segment(whole, 2, 0, 0))},
		{"not CUDA's", "not a CUDA driver: missing symbols: cuInit, cuDriverGetVersion", file(hide(t, whole, "cuInit", "cuDriverGetVersion"))},
		{"stub library", "cuInit failed", func(path string) { newStub(t, whole, path).results[cuapi.IDInit] = 34 }},
		{"too old", "too old", func(path string) { newStub(t, whole, path).version = 9020 }},
		{"incomplete", "missing symbols: cuEventQuery", file(hide(t, whole, "cuEventQuery"))},
	}
}

// segment changes byte at of the first program header of this type.
func segment(image []byte, typ uint32, at int, b byte) []byte {
	image = bytes.Clone(image)
	p := image[binary.LittleEndian.Uint64(image[32:]):]
	for binary.LittleEndian.Uint32(p) != typ {
		p = p[segmentSize:]
	}
	p[at] = b
	return image
}

// A bad candidate does not end the search, and has its line in the message
// when nothing serves.
func TestSearch(t *testing.T) {
	t.Setenv(envPath, "")
	cases := bad(t)
	s := searcher{root: t.TempDir()}
	for i, c := range cases {
		s.files = append(s.files, fmt.Sprintf("/%d/libcuda.so.1", i))
		c.make(s.root + s.files[i])
	}
	lib, err := s.open("")
	var e *Error
	if lib != nil || !errors.As(err, &e) || len(e.Attempts) != len(cases) {
		t.Fatalf("%v, %v", lib, err)
	}
	lines := strings.Split(err.Error(), "\n")[1:]
	if len(lines) != len(cases) {
		t.Fatalf("%d lines for %d attempts:\n%v", len(lines), len(cases), err)
	}
	for i, c := range cases {
		path := s.root + s.files[i]
		if e.Attempts[i].Path != path || !strings.HasPrefix(lines[i], "\t"+path+": ") || !strings.Contains(lines[i], c.reason) {
			t.Errorf("%s: %q, want %q", c.name, lines[i], c.reason)
		}
		if strings.Count(lines[i], path) != 1 {
			t.Errorf("%s: the path stands more than once: %q", c.name, lines[i])
		}
	}
	for _, want := range []any{new(*FileError), new(*LinkError), new(*InitError), new(*MissingError), new(*VersionError)} {
		if !errors.As(err, want) {
			t.Errorf("no %T among the reasons", want)
		}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		t.Error("no fs.ErrNotExist among the reasons")
	}

	s.files = append(s.files, "/good/libcuda.so.1", "/never/libcuda.so.1")
	good := newStub(t, image(t), s.root+"/good/libcuda.so.1")
	if lib, err = s.open(""); err != nil {
		t.Fatal(err)
	}
	if lib.Path != good.path {
		t.Errorf("opened %s", lib.Path)
	}

	// The path of the call is tried alone.
	if lib, err = s.open(s.root + "/never/here.so"); lib != nil || !errors.As(err, &e) || len(e.Attempts) != 1 || e.Attempts[0].Path != s.root+"/never/here.so" {
		t.Errorf("%v, %v", lib, err)
	}
}

// The path of the environment is tried first. Where it does not serve, the
// search goes on.
func TestSearchBeginsWithTheEnvironment(t *testing.T) {
	s := searcher{root: t.TempDir(), names: []string{"libpurecuda-there-is-none.so"}, files: []string{"/usual/libcuda.so.1"}}
	usual := newStub(t, image(t), s.root+"/usual/libcuda.so.1")
	named := newStub(t, image(t), "")
	for name, c := range map[string]struct{ env, want string }{
		"unset":     {"", usual.path},
		"usable":    {named.path, named.path},
		"the usual": {usual.path, usual.path},
	} {
		t.Setenv(envPath, c.env)
		if lib, err := s.open(""); err != nil || lib.Path != c.want {
			t.Errorf("%s: %v, %v", name, lib, err)
		}
	}
	for _, c := range bad(t) { // whatever is wrong with it
		env := filepath.Join(t.TempDir(), "libcuda.so.1")
		c.make(env)
		t.Setenv(envPath, env)
		if lib, err := s.open(""); err != nil || lib.Path != usual.path {
			t.Errorf("%s: %v, %v", c.name, lib, err)
		}
	}

	// Where nothing serves it has its line, once, before all others.
	s.files = []string{"/never/libcuda.so.1"}
	name, file := s.names[0], s.root+s.files[0]
	for _, c := range []struct {
		env  string
		want []string
	}{
		{"", []string{name, file}},
		{"libm.so.6", []string{"libm.so.6", name, file}},
		{name, []string{name, file}},
		{file, []string{file, name}},
	} {
		t.Setenv(envPath, c.env)
		lib, err := s.open("")
		var e *Error
		if lib != nil || !errors.As(err, &e) {
			t.Fatalf("%q: %v, %v", c.env, lib, err)
		}
		var got []string
		for _, a := range e.Attempts {
			got = append(got, a.Path)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%q: tried %q, want %q", c.env, got, c.want)
		}
	}
}

// A system without the library: the places of the real search below an empty
// root, each with its reason.
func TestEmptyRoot(t *testing.T) {
	t.Setenv(envPath, "")
	s := searcher{files: systemFiles, root: t.TempDir()}
	lib, err := s.open("")
	var e *Error
	if lib != nil || !errors.As(err, &e) || len(e.Attempts) != len(systemFiles) {
		t.Fatalf("%v, %v", lib, err)
	}
	for i, a := range e.Attempts {
		if a.Path != s.root+systemFiles[i] || !errors.Is(a.Err, fs.ErrNotExist) {
			t.Errorf("%d: %v", i, a)
		}
	}
}

// The search begins with the names that the dynamic linker knows, then WSL's.
func TestOrder(t *testing.T) {
	t.Setenv(envPath, "")
	got := system.paths("")
	want := []string{"libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"}
	if len(got) < len(want) || !reflect.DeepEqual(got[:len(want)], want) {
		t.Errorf("%v", got)
	}
}

func TestRelativePath(t *testing.T) {
	s := newStub(t, image(t), "")
	t.Chdir(filepath.Dir(filepath.Dir(s.path)))
	dir := filepath.Base(filepath.Dir(s.path))
	for _, path := range []string{dir + "/libcuda.so.1", "./" + dir + "/libcuda.so.1"} {
		if _, err := Open(path); err != nil {
			t.Error(err)
		}
	}
}

// A name without a slash goes to the dynamic linker.
func TestName(t *testing.T) {
	for name, want := range map[string]error{
		"libm.so.6":                         &MissingError{[]string{"cuInit", "cuDriverGetVersion"}},
		strings.Repeat("n", 1<<20):          syscall.ENAMETOOLONG,
		"nul\x00libm.so.6":                  &FileError{"the path contains a NUL byte"},
		"libpurecuda-there-is-none.so":      &LinkError{"cannot open shared object file: No such file or directory"},
		strings.Repeat("d/", 1<<16) + "lib": syscall.ENAMETOOLONG,
	} {
		lib, err := Open(name)
		var e *Error
		if lib != nil || !errors.As(err, &e) || len(e.Attempts) != 1 || !reflect.DeepEqual(e.Attempts[0].Err, want) {
			t.Errorf("%.40q: %v, %v", name, lib, err)
		}
	}
}

// The real search finds the library that the dynamic linker finds. The linker
// reads its path when a process starts, so a child makes the search.
func TestLinkerFinds(t *testing.T) {
	s := newStub(t, image(t), "")
	// Under an emulator the child needs it too.
	args := append(strings.Fields(os.Getenv("PURECUDA_TEST_EXEC")), os.Args[0])
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "PURECUDA_TEST_OPEN=1", envPath+"=", "LD_LIBRARY_PATH="+filepath.Dir(s.path))
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "libcuda.so.1 13000" {
		t.Errorf("%s, %v", out, err)
	}
}

// openChild is what the child of TestLinkerFinds does instead of tests.
func openChild() int {
	lib, err := Open("")
	if err != nil {
		fmt.Print(err)
		return 1
	}
	fmt.Print(lib.Path, " ", lib.Version)
	return 0
}

// Whatever the path, Open returns a library or an *Error.
func FuzzPath(f *testing.F) {
	for _, seed := range []string{".", "/", "./", "../..", "$ORIGIN", "a b", "/dev/null", "/dev/zero", "/proc/self/mem", "é\xff", "\n", "libm.so.6"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if path == "" {
			path = "/"
		}
		lib, err := Open(path)
		var e *Error
		if (lib == nil) != errors.As(err, &e) || err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, %v", lib, err)
		}
	})
}

// Whatever the file, Open returns an *Error. A file that passes the check is
// code, and no fuzzing may run it.
func FuzzFile(f *testing.F) {
	whole := image(f)
	for _, n := range []int{0, 1, headerSize - 1, headerSize, headerSize + segmentSize, 1024} {
		f.Add(whole[:n])
	}
	f.Add([]byte("#!/bin/sh\n" + strings.Repeat("exit 0\n", 20)))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		if checkELF(bytes.NewReader(b), int64(len(b))) == nil {
			return
		}
		path := filepath.Join(dir, "libcuda.so.1")
		write(t, path, b)
		var file *FileError
		if lib, err := Open(path); lib != nil || !errors.As(err, &file) {
			t.Errorf("%v, %v", lib, err)
		}
	})
}
