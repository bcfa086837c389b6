// Command ycsb is go-ycsb with one database: its client, its core workload and its measurements,
// without the drivers of twenty others.
//
//	ycsb load|run NAME=VALUE...
//
// SIGINT ends a run early; what was measured until then is written.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"

	"github.com/magiconair/properties"
	_ "github.com/pingcap/go-ycsb/db/mysql"
	"github.com/pingcap/go-ycsb/pkg/client"
	"github.com/pingcap/go-ycsb/pkg/measurement"
	"github.com/pingcap/go-ycsb/pkg/prop"
	_ "github.com/pingcap/go-ycsb/pkg/workload"
	"github.com/pingcap/go-ycsb/pkg/ycsb"
)

func fail(what any) {
	fmt.Fprintln(os.Stderr, "ycsb:", what)
	os.Exit(1)
}

func main() {
	if len(os.Args) < 2 || os.Args[1] != "load" && os.Args[1] != "run" {
		fail("usage: ycsb load|run NAME=VALUE...")
	}
	p := properties.NewProperties()
	for _, word := range os.Args[2:] {
		name, value, found := strings.Cut(word, "=")
		if !found {
			fail("not NAME=VALUE: " + word)
		}
		p.Set(name, value)
	}
	p.Set(prop.TableName, prop.TableNameDefault)
	p.Set(prop.Command, os.Args[1])
	p.Set(prop.DoTransactions, strconv.FormatBool(os.Args[1] == "run"))
	measurement.InitMeasure(p)
	workload, err := ycsb.GetWorkloadCreator("core").Create(p)
	if err != nil {
		fail(err)
	}
	db, err := ycsb.GetDBCreator("mysql").Create(p)
	if err != nil {
		fail(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client.NewClient(p, workload, client.DbWrapper{DB: db}).Run(ctx)
	measurement.Output()
	workload.Close()
	db.Close()
}
