package publish_test

import (
	"embed"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/purecuda/purecuda/publish"
)

// What can be reached from a publication by exported methods and fields, and
// from the errors that carry one. Nothing of it is, or leads to, an address of
// device memory: whoever adds a line here shows that it is so.
var reachable = []string{
	"pinned.Buffer.Bytes() []uint8", // host memory, and nil while it is moved
	"pinned.Buffer.Close() error",
	"pinned.Buffer.Err() error",
	"pinned.Buffer.Len() int",
	"publish.DType.Size() int",
	"publish.DType.String() string",
	"publish.Publication.AwaitFrontier(context.Context) error",
	"publish.Publication.Bytes() int64",
	"publish.Publication.Close() error",
	"publish.Publication.DType() publish.DType",
	"publish.Publication.Done() <-chan struct {}",
	"publish.Publication.DownloadInto(*pinned.Buffer) *publish.Transfer error",
	"publish.Publication.DownloadIntoContext(context.Context, *pinned.Buffer) *publish.Transfer error",
	"publish.Publication.DownloadRange(*pinned.Buffer, int64, int64) *publish.Transfer error",
	"publish.Publication.DownloadRangeContext(context.Context, *pinned.Buffer, int64, int64) *publish.Transfer error",
	"publish.Publication.Err() error",
	"publish.Publication.FrontierReady() bool error",
	"publish.Publication.Leak()",
	"publish.Publication.Shape() []int",
	"publish.RejectedError.Buffer *pinned.Buffer",
	"publish.RejectedError.Error() string",
	"publish.RejectedError.Op string",
	"publish.RejectedError.Publication *publish.Publication",
	"publish.RejectedError.Reason error",
	"publish.RejectedError.Unwrap() error",
	"publish.RejectedError.Value *publish.Value",
	"publish.Transfer.Close() error",
	"publish.Transfer.Done() <-chan struct {}",
	"publish.Transfer.Err() error",
	"publish.Transfer.Leak()",
	"publish.Transfer.Ready() bool error",
	"publish.Transfer.Wait(context.Context) *pinned.Buffer error",
	"publish.UnprovenError.Cause error",
	"publish.UnprovenError.Error() string",
	"publish.UnprovenError.Op string",
	"publish.UnprovenError.Unwrap() error",
	"publish.Value.Bytes() int64",
	"publish.Value.Close() error",
	"publish.Value.DType() publish.DType",
	"publish.Value.Err() error",
	"publish.Value.Leak()",
	"publish.Value.Shape() []int",
}

func TestEvidenceNoWayToTheAddressOfAPublication(t *testing.T) {
	w := &apiWalk{seen: map[reflect.Type]bool{}, lines: map[string]bool{}}
	for _, root := range []any{new(publish.Publication), new(publish.RejectedError), new(publish.UnprovenError)} {
		w.visit(reflect.TypeOf(root), "")
	}
	if diff := cmp.Diff(reachable, slices.Sorted(maps.Keys(w.lines))); diff != "" {
		t.Errorf("what can be reached from a publication changed (-listed +is): %s", diff)
	}
	for _, bad := range w.bad {
		t.Error(bad)
	}
	// Functions of the package, and methods of all its types.
	for _, f := range exported(t) {
		for _, p := range f.params {
			if strings.Contains(p, "Publication") {
				t.Errorf("%s takes a publication: %s", f.name, p)
			}
		}
		for _, r := range f.results {
			if rawType(r) && f.name != "Session.Raw" { // the driver's stream
				t.Errorf("%s returns %s", f.name, r)
			}
		}
	}
}

// An apiWalk goes through exported methods and fields of this module's types.
type apiWalk struct {
	seen  map[reflect.Type]bool
	lines map[string]bool
	bad   []string
}

func (w *apiWalk) visit(t reflect.Type, from string) {
	switch t.Kind() {
	case reflect.Uintptr, reflect.UnsafePointer, reflect.Uint64, reflect.Func, reflect.Map:
		w.bad = append(w.bad, fmt.Sprintf("%s gives a %v", from, t))
	case reflect.Slice, reflect.Array, reflect.Chan:
		w.visit(t.Elem(), from)
	case reflect.Pointer:
		if !ours(t.Elem()) {
			w.bad = append(w.bad, fmt.Sprintf("%s gives a %v", from, t))
			return
		}
		w.members(t)
	default:
		if ours(t) {
			w.members(t)
		}
	}
}

func (w *apiWalk) members(t reflect.Type) {
	if w.seen[t] {
		return
	}
	w.seen[t] = true
	name := strings.TrimPrefix(t.String(), "*")
	for i := range t.NumMethod() {
		m := t.Method(i)
		var in, out []string
		for j := 1; j < m.Type.NumIn(); j++ {
			in = append(in, m.Type.In(j).String())
		}
		for j := range m.Type.NumOut() {
			out = append(out, m.Type.Out(j).String())
			w.visit(m.Type.Out(j), name+"."+m.Name)
		}
		w.lines[strings.TrimSpace(fmt.Sprintf("%s.%s(%s) %s", name, m.Name, strings.Join(in, ", "), strings.Join(out, " ")))] = true
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return
	}
	for i := range t.NumField() {
		if f := t.Field(i); f.IsExported() {
			w.lines[fmt.Sprintf("%s.%s %v", name, f.Name, f.Type)] = true
			w.visit(f.Type, name+"."+f.Name)
		}
	}
}

func ours(t reflect.Type) bool { return strings.HasPrefix(t.PkgPath(), "github.com/purecuda/purecuda") }

// The package's source travels in the test, which also runs where there is none.
//
//go:embed *.go
var source embed.FS

// A signature is of an exported function, or an exported method of an exported type, with
// the text of its types.
type signature struct {
	name            string
	params, results []string
}

func exported(t testing.TB) (all []signature) {
	t.Helper()
	files, err := source.ReadDir(".")
	must(t, err)
	for _, f := range files {
		if strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		text, err := source.ReadFile(f.Name())
		must(t, err)
		syn, err := parser.ParseFile(token.NewFileSet(), f.Name(), text, 0)
		must(t, err)
		for _, d := range syn.Decls {
			if vars, ok := d.(*ast.GenDecl); ok && vars.Tok == token.VAR {
				for _, s := range vars.Specs {
					for _, name := range s.(*ast.ValueSpec).Names {
						if name.IsExported() && !strings.HasPrefix(name.Name, "Err") {
							t.Errorf("%s is a variable that may be a function", name.Name)
						}
					}
				}
			}
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !fn.Name.IsExported() {
				continue
			}
			one := signature{name: fn.Name.Name, params: typesOf(fn.Type.Params), results: typesOf(fn.Type.Results)}
			if fn.Recv != nil {
				on := strings.TrimPrefix(typesOf(fn.Recv)[0], "*")
				if !ast.IsExported(on) {
					continue
				}
				one.name = on + "." + one.name
			}
			all = append(all, one)
		}
	}
	if len(all) < 40 {
		t.Fatalf("found %d exported functions", len(all))
	}
	return all
}

func typesOf(list *ast.FieldList) (texts []string) {
	if list == nil {
		return nil
	}
	for _, f := range list.List {
		for range max(1, len(f.Names)) {
			texts = append(texts, types.ExprString(f.Type))
		}
	}
	return texts
}

// rawType tells that a type's text may stand for an address.
func rawType(text string) bool {
	for _, word := range []string{"uintptr", "uint64", "unsafe.", "cuapi.", "memory.", "any", "interface", "reflect."} {
		if strings.Contains(text, word) {
			return true
		}
	}
	return false
}
