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
	{"internal/outside", ""},
	{"internal/child", ""},
	{"internal/watch", "internal/outside"},
	{"retirequeue", ""},
	{"internal/cuload", "internal/cuapi"},
	{"internal/room", "internal/outside"},
	{"internal/wire", "internal/cuapi internal/own internal/room"},
	{"driver", "internal/cuapi internal/cuload internal/outside internal/own internal/wire"},
	{"internal/hold", "driver internal/cuapi internal/wire"},
	{"event", "driver internal/cuapi internal/own internal/wire"},
	{"stream", "driver event internal/cuapi internal/outside internal/own internal/watch internal/wire"},
	{"memory", "driver event stream internal/cuapi internal/own internal/wire"},
	{"pinned", "driver internal/cuapi internal/own internal/wire"},
	{"kernel", "driver stream internal/cuapi internal/own internal/wire"},
	{"publish", "driver event stream memory pinned kernel retirequeue internal/cuapi internal/outside internal/own internal/room internal/watch internal/wire"},
	{"internal/osthread", ""},
	{"internal/ptx", ""},
	{"cudasim", "driver internal/cuapi internal/osthread internal/ptx internal/wire"},
	{"cudasim/fault", "driver internal/cuapi internal/outside internal/wire"},
	{"internal/dst", ""}, // tests alone
	{"driver/drivertest", "driver kernel pinned publish internal/child internal/cuapi internal/hold internal/wire"},
	{"driver/difftest", "driver driver/drivertest internal/cuapi internal/hold internal/wire"},
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
			if inside && !slices.Contains(strings.Fields(l.may), p) {
				bad = append(bad, fmt.Sprintf("%s: %s may not import %s", f.at(i), f.pkg(), p))
			}
		}
	}
	return bad
}

// layersExist: a row without a package allows what nobody has looked at.
func layersExist(t tree) (bad []string) {
	exists := map[string]bool{}
	for _, f := range t.goFiles() {
		exists[f.pkg()] = exists[f.pkg()] || !f.isTest()
	}
	for _, l := range layers {
		if !exists[l.pkg] {
			bad = append(bad, "there is no package "+l.pkg)
		}
	}
	return bad
}

// layersAreOrdered checks the table itself.
func layersAreOrdered(list []layer) (bad []string) {
	seen := map[string]bool{}
	for _, l := range list {
		for _, p := range strings.Fields(l.may) {
			if !seen[p] {
				bad = append(bad, fmt.Sprintf("%s may import %s, which is not below it", l.pkg, p))
			}
		}
		seen[l.pkg] = true
	}
	return bad
}
