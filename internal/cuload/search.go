//go:build (linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)) || (windows && (amd64 || arm64))

package cuload

import (
	"os"
	"slices"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// envPath names the environment variable with the path of the library to try
// first.
const envPath = "PURECUDA_DRIVER"

// A searcher opens the first usable library.
type searcher struct {
	names []string // that the dynamic linker resolves
	files []string // paths below root
	root  string   // "" but in tests
}

var system = searcher{names: systemNames, files: systemFiles}

// paths lists what a search with this path tries, in order.
func (s searcher) paths(path string) []string {
	if path != "" {
		return []string{path}
	}
	first := os.Getenv(envPath)
	var list []string
	if first != "" {
		list = append(list, first)
	}
	for _, n := range s.names {
		if n != first {
			list = append(list, n)
		}
	}
	for _, f := range s.files {
		if f = s.root + f; f != first {
			list = append(list, f)
		}
	}
	return list
}

func (s searcher) open(path string) (*Library, error) {
	e := &Error{}
	for _, p := range s.paths(path) {
		lib, err := load(p)
		if err == nil {
			return lib, nil
		}
		e.Attempts = append(e.Attempts, Attempt{p, err})
	}
	return nil, e
}

// bootIDs are the entry points that finding the others needs. They come from
// the library's exports alone: cuGetProcAddress answers for its second version
// with its first, whose parameters are others.
var bootIDs = []cuapi.ID{cuapi.IDInit, cuapi.IDDriverGetVersion, cuapi.IDGetProcAddressV2, cuapi.IDGetProcAddress}

// load opens one library and prepares it for use.
func load(path string) (*Library, error) {
	h, err := dlopen(path)
	if err != nil {
		return nil, err
	}
	lib := &Library{Path: path, Table: &cuapi.Table{}}
	addrs := new([cuapi.NumEntries]uintptr)
	for _, id := range bootIDs {
		addrs[id], lib.Symbols[id] = export(h, id)
	}
	if err := missing(addrs, cuapi.IDInit, cuapi.IDDriverGetVersion); err != nil {
		dlclose(h) // nothing of it was called
		return nil, err
	}
	// From here on the library stays loaded, come what may.
	boot := &cuapi.Table{}
	fill(boot, addrs)
	if r := boot.Init(0); r != cuapi.Success {
		return nil, &InitError{"cuInit", r}
	}
	var version int32
	if r := boot.DriverGetVersion(&version); r != cuapi.Success {
		return nil, &InitError{"cuDriverGetVersion", r}
	}
	if version < MinVersion {
		return nil, &VersionError{int(version)}
	}
	lib.Key, lib.Version = addrs[cuapi.IDInit], int(version)
	var rest []cuapi.ID
	for id := range cuapi.ID(cuapi.NumEntries) {
		if slices.Contains(bootIDs, id) {
			continue
		}
		if addrs[id], lib.Symbols[id] = lookup(boot, id, lib.Version); addrs[id] == 0 {
			addrs[id], lib.Symbols[id] = export(h, id)
		}
		rest = append(rest, id)
	}
	if err := missing(addrs, rest...); err != nil {
		return nil, err
	}
	fill(lib.Table, addrs)
	lib.Table.HostWait = hostWait
	return lib, nil
}

// missing returns a *MissingError that names the required entry points
// without an address.
func missing(addrs *[cuapi.NumEntries]uintptr, ids ...cuapi.ID) error {
	e := &MissingError{}
	for _, id := range ids {
		if ent := &cuapi.Entries[id]; ent.Required && addrs[id] == 0 {
			e.Symbols = append(e.Symbols, ent.Symbol())
		}
	}
	if e.Symbols == nil {
		return nil
	}
	return e
}

// export finds an entry point among the library's symbols, newest first.
func export(h uintptr, id cuapi.ID) (uintptr, string) {
	for _, s := range cuapi.Entries[id].Symbols {
		if addr := dlsym(h, s.Name); addr != 0 {
			return addr, s.Name
		}
	}
	return 0, ""
}

// lookup asks the driver itself for an entry point, newest symbol first.
// Symbols newer than the driver are not asked for.
func lookup(t *cuapi.Table, id cuapi.ID, version int) (uintptr, string) {
	list := cuapi.Entries[id].Symbols
	for i, s := range list {
		if s.Since > version {
			continue
		}
		addr := ask(t, s)
		// What the driver lacks it answers with its next older version.
		if addr == 0 || i+1 < len(list) && addr == ask(t, list[i+1]) {
			continue
		}
		return addr, s.Name
	}
	return 0, ""
}

// ask returns the address that cuGetProcAddress gives for the symbol, or 0.
// The driver knows functions by the name without its version, and answers with
// the newest that is not newer than the version asked for; so a symbol is
// asked for at the version that introduced it.
func ask(t *cuapi.Table, s cuapi.Symbol) uintptr {
	name := append([]byte(base(s.Name)), 0)
	var addr uintptr
	r := cuapi.NotFound
	switch {
	case t.GetProcAddressV2 != nil:
		var status int32
		r = t.GetProcAddressV2(&name[0], &addr, int32(s.Since), 0, &status)
	case t.GetProcAddress != nil:
		r = t.GetProcAddress(&name[0], &addr, int32(s.Since), 0)
	}
	if r != cuapi.Success {
		return 0
	}
	return addr
}

// base strips the version from a symbol: "cuMemAlloc_v2" is "cuMemAlloc".
func base(symbol string) string {
	i := len(symbol)
	for i > 0 && symbol[i-1] >= '0' && symbol[i-1] <= '9' {
		i--
	}
	if i < len(symbol) && i > 2 && symbol[i-2:i] == "_v" {
		return symbol[:i-2]
	}
	return symbol
}
