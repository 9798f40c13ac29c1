package main

import (
	"fmt"
	"regexp"
	"strings"
)

// An entry is one line of the manifest.
type entry struct {
	Name     string // Go name of the Table's field: "MemAlloc"
	Symbols  []symbol
	Required bool
	Block    string
	List     bool // may stand in a Table.Run list
	Proto    string
	Func     string // the C function that the prototype names
	Params   []param
}

type symbol struct {
	Name  string // "cuMemAlloc_v2"
	Since int    // 3020: CUDA 3.2, as the driver counts
}

type param struct {
	Name string
	C    string // C type, normalized: "const char*"
	Go   string // type in package cuapi: "*byte"
}

// pointer tells whether the parameter is a pointer on the Go side, so that
// its argument must stay typed for the collector.
func (p param) pointer() bool { return p.Go == "HostPtr" || strings.HasPrefix(p.Go, "*") }

// signed tells whether widening the argument to 64 bits extends its sign.
func (p param) signed() bool { return p.Go == "int32" || p.Go == "Device" }

func (e entry) since() int { return e.Symbols[len(e.Symbols)-1].Since }

// goTypes maps each C parameter type to its Go type in package cuapi.
var goTypes = map[string]string{
	"int": "int32", "unsigned int": "uint32", "unsigned char": "uint8",
	"size_t": "uintptr", "cuuint32_t": "uint32", "cuuint64_t": "uint64",
	"int*": "*int32", "unsigned int*": "*uint32", "size_t*": "*uintptr", "cuuint64_t*": "*uint64", "float*": "*float32",
	"char*": "*byte", "const char*": "*byte", "const char**": "**byte",
	"void*": "HostPtr", "const void*": "HostPtr", "void**": "*HostPtr",
	"CUresult": "Result", "CUdevice": "Device", "CUdevice*": "*Device",
	"CUcontext": "Context", "CUcontext*": "*Context",
	"CUdeviceptr": "DevicePtr", "CUdeviceptr*": "*DevicePtr",
	"CUstream": "Stream", "CUstream*": "*Stream",
	"CUevent": "Event", "CUevent*": "*Event",
	"CUmodule": "Module", "CUmodule*": "*Module",
	"CUfunction": "Function", "CUfunction*": "*Function",
	"CUgraph": "Graph", "CUgraph*": "*Graph",
	"CUmemoryPool": "MemPool", "CUmemoryPool*": "*MemPool",
	"CUuuid*": "*UUID", "const CUmemPoolProps*": "*MemPoolProps",
	"const CUmemAccessDesc*": "*MemAccessDesc", "CUmemLocation*": "*MemLocation", "CUmemAccess_flags*": "*int32",
	"CUdevice_attribute": "int32", "CUdevice_P2PAttribute": "int32", "CUpointer_attribute": "int32",
	"CUfunction_attribute": "int32", "CUmemPool_attribute": "int32", "CUstreamCaptureMode": "int32",
	"CUstreamCaptureMode*": "*int32", "CUstreamCaptureStatus*": "*int32", "CUjit_option*": "*int32",
	"CUhostFn": "uintptr", "CUoccupancyB2DSize": "uintptr", "CUlogIterator*": "*uint32",
}

// goOverrides are the parameters whose C type says too little.
var goOverrides = map[string]string{
	// Values are numbers and addresses in turn: not all are pointers.
	"cuModuleLoadDataEx.optionValues": "*uintptr",
	// An opaque number for the C callback, never followed by Go.
	"cuLaunchHostFunc.userData": "uintptr",
	// A code address, not Go memory.
	"cuGetProcAddress.pfn":    "*uintptr",
	"cuGetProcAddress_v2.pfn": "*uintptr",
}

var (
	blocks    = []string{"no", "lock", "full", "held", "waits", "setup"}
	protoForm = regexp.MustCompile(`^CUresult (cu\w+)\((.*)\)$`)
	paramForm = regexp.MustCompile(`^(.*?)\s*(\*+)?\s*(\w+)$`)
	suffix    = regexp.MustCompile(`_v\d+$`)
)

func parse(src string) ([]entry, error) {
	var entries []entry
	seen := map[string]bool{}
	for i, line := range strings.Split(src, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		e, err := parseLine(line)
		if err != nil {
			return nil, fmt.Errorf("manifest.txt:%d: %w", i+1, err)
		}
		if seen[e.Name] {
			return nil, fmt.Errorf("manifest.txt:%d: %s stands twice", i+1, e.Name)
		}
		seen[e.Name] = true
		entries = append(entries, e)
	}
	return entries, nil
}

func parseLine(line string) (entry, error) {
	cols := strings.Split(line, "|")
	if len(cols) != 5 {
		return entry{}, fmt.Errorf("%d columns, want 5", len(cols))
	}
	for i := range cols {
		cols[i] = strings.TrimSpace(cols[i])
	}
	var e entry
	for _, s := range strings.Fields(cols[0]) {
		name, version, ok := strings.Cut(s, "@")
		var major, minor int
		if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); !ok || err != nil {
			return e, fmt.Errorf("symbol %q is not name@major.minor", s)
		}
		e.Symbols = append(e.Symbols, symbol{name, major*1000 + minor*10})
	}
	switch cols[1] {
	case "required", "optional":
		e.Required = cols[1] == "required"
	default:
		return e, fmt.Errorf("need %q", cols[1])
	}
	e.Block = cols[2]
	if !contains(blocks, e.Block) {
		return e, fmt.Errorf("block %q is none of %v", e.Block, blocks)
	}
	switch cols[3] {
	case "list", "-":
		e.List = cols[3] == "list"
	default:
		return e, fmt.Errorf("run %q", cols[3])
	}
	e.Proto = cols[4]
	m := protoForm.FindStringSubmatch(e.Proto)
	if m == nil {
		return e, fmt.Errorf("prototype %q", e.Proto)
	}
	e.Func = m[1]
	if e.Func != e.Symbols[0].Name {
		return e, fmt.Errorf("the prototype names %s, the newest symbol is %s", e.Func, e.Symbols[0].Name)
	}
	e.Name = suffix.ReplaceAllString(strings.TrimPrefix(e.Func, "cu"), "")
	if e.Func == "cuGetProcAddress_v2" {
		e.Name = "GetProcAddressV2" // another parameter list than its first version
	}
	if m[2] != "void" {
		for _, text := range strings.Split(m[2], ",") {
			pm := paramForm.FindStringSubmatch(strings.TrimSpace(text))
			if pm == nil {
				return e, fmt.Errorf("parameter %q", text)
			}
			p := param{Name: pm[3], C: pm[1] + pm[2]}
			p.Go = goTypes[p.C]
			if over := goOverrides[e.Func+"."+p.Name]; over != "" {
				p.Go = over
			}
			if p.Go == "" {
				return e, fmt.Errorf("no Go type for %q", p.C)
			}
			e.Params = append(e.Params, p)
		}
	}
	if e.List && pointers(e) > 2 {
		return e, fmt.Errorf("%s has more pointers than a list entry keeps", e.Name)
	}
	return e, nil
}

func pointers(e entry) int {
	n := 0
	for _, p := range e.Params {
		if p.pointer() {
			n++
		}
	}
	return n
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
