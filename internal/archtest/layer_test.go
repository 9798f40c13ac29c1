package archtest

import (
	"fmt"
	"slices"
	"strings"
)

// A layer is a package with what it may import of this module. Only packages
// listed before it may be among them, so imports point downward.
type layer struct {
	pkg string
	may string
}

var layers = []layer{
	{"internal/cuapi", ""},
	{"internal/gen", ""},
	{"internal/own", ""},
	{"internal/watch", ""},
	{"retirequeue", ""},
	{"internal/cuload", "internal/cuapi"},
	{"internal/wire", "internal/cuapi internal/own"},
	{"driver", "internal/cuapi internal/cuload internal/own internal/wire"},
	{"internal/hold", "driver internal/cuapi internal/wire"},
	{"event", "driver internal/cuapi internal/own internal/wire"},
	{"stream", "driver event internal/cuapi internal/own internal/watch internal/wire"},
	{"memory", "driver event stream internal/cuapi internal/own internal/wire"},
	{"pinned", "driver internal/cuapi internal/own internal/wire"},
	{"kernel", "driver stream internal/cuapi internal/own internal/wire"},
	{"publish", "driver event stream memory pinned kernel retirequeue internal/cuapi internal/own internal/watch internal/wire"},
	{"cudasim", "driver internal/cuapi internal/wire"},
	{"cudasim/fault", "driver cudasim internal/cuapi internal/wire"},
	{"internal/dst", "*"},
	{"driver/drivertest", "driver pinned publish internal/cuapi internal/hold internal/wire"},
}

// free are programs and tests, which may import anything.
func free(pkg string) bool {
	return strings.HasPrefix(pkg, "examples/") || strings.HasPrefix(pkg, "cmd/") || strings.HasPrefix(pkg, "bench/")
}

// importsPointDown checks the directions of all imports of code that is no
// test.
func importsPointDown(t tree) (bad []string) {
	byName := map[string]layer{}
	for _, l := range layers {
		byName[l.pkg] = l
	}
	for _, f := range t.goFiles() {
		if f.isTest() || free(f.pkg()) {
			continue
		}
		l, ok := byName[f.pkg()]
		if !ok {
			bad = append(bad, fmt.Sprintf("%s: package %s is in no layer", f.name, f.pkg()))
			continue
		}
		for _, i := range f.syn.Imports {
			p, inside := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), modulePath+"/")
			if inside && l.may != "*" && !slices.Contains(strings.Fields(l.may), p) {
				bad = append(bad, fmt.Sprintf("%s: %s may not import %s", f.at(i), f.pkg(), p))
			}
		}
	}
	return bad
}

// layersAreOrdered checks the table itself.
func layersAreOrdered(list []layer) (bad []string) {
	seen := map[string]bool{}
	for _, l := range list {
		for _, p := range strings.Fields(l.may) {
			if p != "*" && !seen[p] {
				bad = append(bad, fmt.Sprintf("%s may import %s, which is not below it", l.pkg, p))
			}
		}
		seen[l.pkg] = true
	}
	return bad
}
