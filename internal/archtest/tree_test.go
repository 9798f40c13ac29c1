// Package archtest has the rules of the house as tests: each is a function of
// the source tree that returns complaints, is applied to this module, and is
// tested on a small bad example, so that it can fail.
package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const modulePath = "github.com/purecuda/purecuda"

// A tree is the text files of a module, by their slash-separated paths.
type tree map[string]*file

type file struct {
	name string
	text string
	syn  *ast.File // of Go files
	set  *token.FileSet
}

// at says where a node is.
func (f *file) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", f.name, f.set.Position(n.Pos()).Line)
}

func (f *file) isGo() bool   { return f.syn != nil }
func (f *file) isTest() bool { return strings.HasSuffix(f.name, "_test.go") }
func (f *file) pkg() string  { return path.Dir(f.name) }
func (f *file) isUnsafe() bool {
	return strings.HasSuffix(strings.TrimSuffix(f.base(), "_test"), "_unsafe")
}

// base is the file's name without folder and ".go".
func (f *file) base() string { return strings.TrimSuffix(path.Base(f.name), ".go") }

// imports returns the paths that a file imports; those of this module without
// the module's path.
func (f *file) imports() (list []string) {
	for _, i := range f.syn.Imports {
		p := strings.Trim(i.Path.Value, `"`)
		list = append(list, strings.TrimPrefix(p, modulePath+"/"))
	}
	return list
}

// add adds a file.
func (t tree) add(tb testing.TB, name, text string) {
	f := &file{name: name, text: text}
	if strings.HasSuffix(name, ".go") {
		f.set = token.NewFileSet()
		syn, err := parser.ParseFile(f.set, name, text, parser.ParseComments)
		if err != nil {
			tb.Fatal(err)
		}
		f.syn = syn
	}
	t[name] = f
}

// goFiles returns the module's own Go files: not those of a module inside it.
func (t tree) goFiles() (list []*file) {
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if f := t[name]; f.isGo() && !t.nested(f.pkg()) {
			list = append(list, f)
		}
	}
	return list
}

// nested tells whether a folder is in a module of its own.
func (t tree) nested(dir string) bool {
	for ; dir != "."; dir = path.Dir(dir) {
		if t[dir+"/go.mod"] != nil {
			return true
		}
	}
	return false
}

// testdata is no part of the program, and what starts with a dot is of tools,
// but for CI's own script.
func leaveOut(name string) bool {
	base := path.Base(name)
	return base == "bin" || base == "testdata" || strings.HasPrefix(base, ".") && base != ".ci" && base != ".gitignore"
}

// readTree reads this module from disk.
func readTree(tb testing.TB) tree {
	t := tree{}
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		name := filepath.ToSlash(rel)
		switch {
		case name == ".":
		case leaveOut(name):
			if d.IsDir() {
				return fs.SkipDir
			}
		case d.Type().IsRegular():
			text, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			if !strings.Contains(string(text[:min(len(text), 8000)]), "\x00") { // not a program or picture
				t.add(tb, name, string(text))
			}
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return t
}
