package publish

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/purecuda/purecuda/internal/own"
)

// tables are the state tables of this package by machine.
var tables = map[string]any{
	"publication": publicationTable, "transfer": transferTable,
	"value": valueTable, "session": sessionTable, "runtime": runtimeTable,
}

func (a act) String() string {
	return [...]string{"impossible", "answers", "looks", "waits", "proceeds", "fails", "refuses", "retires", "keeps", "ends"}[a]
}

// Rows returns the rows of all tables in words: "does: act act act" by
// "machine/method", without "does: " for a machine that has no cell.
func Rows() map[string]string {
	rows := map[string]string{}
	for machine, table := range tables {
		v := reflect.ValueOf(table)
		for i := range v.NumField() {
			var text string
			var acts [numColumns]act
			switch row := v.Field(i).Interface().(type) {
			case rule:
				text, acts = row.does.String()+": ", row.at
			case [numColumns]act:
				acts = row
			}
			rows[machine+"/"+v.Type().Field(i).Name] = text + strings.Trim(fmt.Sprint(acts), "[]")
		}
	}
	return rows
}

// Tables returns the names of the machines that have a table.
func Tables() (names []string) {
	for name := range tables {
		names = append(names, name)
	}
	return names
}

// MovingTransfer runs f while t is being moved, which Wait does between no two
// driver calls. The move is refused then.
func MovingTransfer(t *Transfer, f func()) {
	if err := t.r.transfer.Take(); err != nil {
		panic(err)
	}
	f()
	if t.r.transfer.Restore() {
		t.r.closeTransfer()
	}
}

// StateOf returns the state of the cell of a handle.
func StateOf(handle any) own.State {
	switch h := handle.(type) {
	case *Value:
		if h != nil && h.r != nil {
			return h.r.val.State()
		}
	case *Publication:
		if h != nil && h.r != nil {
			return h.r.pub.State()
		}
	case *Transfer:
		if h != nil && h.r != nil {
			return h.r.transfer.State()
		}
	case *Session:
		if h != nil && h.st != nil {
			return h.st.cell.State()
		}
	}
	return own.Absent
}

// Waiting returns how many waits for room of the runtime, or in its context.
func Waiting(rt *Runtime) int {
	return rt.slots.Waiting() + rt.core.Credits.Waiting() + rt.core.Memory.Waiting()
}
